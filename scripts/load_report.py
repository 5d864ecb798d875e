"""Tables and pictures of load tests."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from measuring import Figures, quantile

COLOURS = {
    "worker": "#1f6fb4",
    "direct": "#c8553d",
    "bare": "#5c946e",
    "frames": "#8d7aa8",
    "durable writes": "#1f6fb4",
    "conversations read": "#5c946e",
}
OTHER_COLOUR = "#555555"
CURVE_POINTS = 400


class Ratio(msgspec.Struct):
    """The worker at one number of clients against one peer, or against itself at the first number measured.

    `throughput` and `p999` are the worker's figure over the peer's: of all rounds together, and the least and
    the greatest of the single rounds.
    """

    peer: str
    clients: int
    throughput: float
    throughput_rounds: tuple[float, float]
    p999: float
    p999_rounds: tuple[float, float]


class Measured(msgspec.Struct):
    """One kind at one number of clients: all rounds together, and each of them."""

    kind: str
    clients: int
    figures: Figures
    rounds: list[Figures]


def ratios(measured: Sequence[Measured]) -> list[Ratio]:
    """The worker's figures over every peer's at the same number of clients, then over its own at the first number."""
    ours = {found.clients: found for found in measured if found.kind == "worker"}
    against_peers = [
        _ratio(ours[peer.clients], peer, peer.kind)
        for peer in measured
        if peer.kind != "worker" and peer.clients in ours
    ]
    first, *others = ours.values()
    return against_peers + [_ratio(other, first, f"worker, {first.clients} clients") for other in others]


def _ratio(ours: Measured, peer: Measured, name: str) -> Ratio:
    pairs = list(zip(ours.rounds, peer.rounds, strict=True))
    throughput = [_over(one.operations_per_s, other.operations_per_s) for one, other in pairs]
    p999 = [_over(one.p999_ms, other.p999_ms) for one, other in pairs]
    return Ratio(
        name,
        ours.clients,
        _over(ours.figures.operations_per_s, peer.figures.operations_per_s),
        (min(throughput), max(throughput)),
        _over(ours.figures.p999_ms, peer.figures.p999_ms),
        (min(p999), max(p999)),
    )


def _over(one: float, other: float) -> float:
    return one / other if other else 0.0


def print_report(console: Console, title: str, measured: Sequence[Measured]) -> None:
    """The table of figures, and the table of ratios where there are peers or several numbers of clients."""
    table = Table(
        title=f"{title} (latencies in ms, CPU in µs an operation)", title_justify="left", box=SIMPLE_HEAD
    )
    table.add_column("kind")
    for heading in (
        "clients",
        "op/s",
        "p50",
        "p99",
        "p99.9",
        "max",
        "least/most",
        "worker CPU",
        "client CPU",
    ):
        table.add_column(heading, justify="right")
    table.add_column("errors")
    for found in measured:
        table.add_row(*_cells(found), style="bold" if found.kind == "worker" else "")
    console.print(table)
    compared = ratios(measured)
    if compared:
        console.print(_ratio_table(compared))


def _cells(found: Measured) -> list[str]:
    own = found.figures
    return [
        found.kind,
        str(found.clients),
        f"{own.operations_per_s:,.0f}",
        *(f"{value:,.2f}" for value in (own.p50_ms, own.p99_ms, own.p999_ms, own.max_ms)),
        f"{own.fairness:.3f}",
        "-" if own.worker_cpu_us is None else f"{own.worker_cpu_us:.1f}",
        f"{own.client_cpu_us:.1f}",
        ", ".join(f"{code} {count:,}" for code, count in sorted(own.errors.items())) or "none",
    ]


def _ratio_table(compared: Sequence[Ratio]) -> Table:
    table = Table(
        title="The worker over its peers and its first number of clients (least and greatest round)",
        title_justify="left",
        box=SIMPLE_HEAD,
    )
    for heading in ("peer", "clients", "throughput", "p99.9 latency"):
        table.add_column(heading, justify="left" if heading == "peer" else "right")
    for ratio in compared:
        table.add_row(
            ratio.peer,
            str(ratio.clients),
            f"{ratio.throughput:.3g} ({ratio.throughput_rounds[0]:.3g} to {ratio.throughput_rounds[1]:.3g})",
            f"{ratio.p999:.3g} ({ratio.p999_rounds[0]:.3g} to {ratio.p999_rounds[1]:.3g})",
        )
    return table


def draw(
    path: Path,
    title: str,
    latencies_ms: Mapping[str, Sequence[float]],
    throughput: Mapping[str, Mapping[int, float]],
) -> None:
    """Write a PNG: how many operations were slower than a latency, and throughput over the number of clients.

    `latencies_ms` maps each kind to its sorted latencies, `throughput` each kind to operations per second by
    number of clients. Where each kind has one number of clients only, throughput is drawn as bars.
    """
    # Drawing takes as long to load as a short test to run; only who asks for a picture pays for it.
    from matplotlib.figure import Figure  # noqa: PLC0415

    figure = Figure(figsize=(12, 5.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    figure.suptitle(title)
    _draw_latencies(left, latencies_ms)
    _draw_throughput(right, throughput)
    figure.savefig(path, dpi=120)


def _draw_latencies(axes: Any, latencies_ms: Mapping[str, Sequence[float]]) -> None:
    for kind, values in latencies_ms.items():
        if not values:
            continue
        # Points lie closer towards the tail, where the curve says most.
        shares = [10 ** (-6 * place / CURVE_POINTS) for place in range(CURVE_POINTS + 1)]
        shares = [share for share in shares if share * len(values) >= 1.0]
        xs = [quantile(values, 1.0 - share) for share in shares] + [values[-1]]
        ys = [*shares, 1.0 / len(values)]
        colour = COLOURS.get(kind, OTHER_COLOUR)
        axes.plot(
            xs, ys, color=colour, label=f"{kind}: p99.9 {_ms(quantile(values, 0.999))}, max {_ms(values[-1])}"
        )
        axes.plot(values[-1], ys[-1], marker="o", markersize=4, color=colour)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_yscale("log")
    axes.set_xlabel("latency, ms")
    axes.set_ylabel("share of operations that took longer")
    for share, name in ((0.5, "p50"), (0.01, "p99"), (0.001, "p99.9")):
        axes.axhline(share, color="#cccccc", linewidth=0.8, zorder=0)
        axes.text(
            1.005, share, name, transform=axes.get_yaxis_transform(), va="center", fontsize=8, color="#777777"
        )
    axes.grid(visible=True, axis="x", color="#eeeeee")
    axes.legend(loc="upper left", bbox_to_anchor=(0, -0.12), ncols=2, frameon=False)
    axes.set_title("Latency", loc="left")


def _ms(value: float) -> str:
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


def _draw_throughput(axes: Any, throughput: Mapping[str, Mapping[int, float]]) -> None:
    numbers = sorted({clients for found in throughput.values() for clients in found})
    if any(len(found) > 1 for found in throughput.values()):
        for kind, found in throughput.items():
            counts = sorted(found)
            axes.plot(
                counts,
                [found[count] for count in counts],
                marker="o",
                color=COLOURS.get(kind, OTHER_COLOUR),
                label=kind,
            )
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set_xlabel("clients")
        axes.set_ylabel("operations per second")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
    else:
        kinds = list(throughput)
        values = [next(iter(throughput[kind].values())) for kind in kinds]
        bars = axes.barh(kinds, values, color=[COLOURS.get(kind, OTHER_COLOUR) for kind in kinds])
        axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.2)
        axes.set_xlabel("operations per second")
    axes.grid(visible=True, color="#eeeeee")
    axes.set_axisbelow(True)
    axes.set_title("Throughput", loc="left")
