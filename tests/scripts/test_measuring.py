"""The figures of a measurement, from samples that are known."""

from array import array

import pytest
from multiprocess.context import SpawnContext

from load_report import Measured, ratios
from measuring import ClientFailedError, Recorder, Run, Sample, figures, quantile, run_clients

SPAWNED = SpawnContext()
"""Leaves no server behind, as the forked context does until the process ends."""


def sample(*latencies_s: float, errors: dict[str, int] | None = None, cpu: float = 0.0) -> Sample:
    return Sample(array("d", latencies_s).tobytes(), errors or {}, cpu)


def test_all_operations_of_all_runs_together() -> None:
    first = Run([sample(0.001, 0.003, cpu=0.5), sample(0.002, errors={"busy": 1}, cpu=0.5)], 2.0, 0.3)
    second = Run([sample(0.004, cpu=0.2), sample(0.005, errors={"busy": 2})], 2.0, 0.2)
    found = figures([first, second])
    assert (found.operations, found.operations_per_s) == (5, 5 / 4)
    assert (found.p50_ms, found.max_ms) == (3.0, 5.0)
    assert found.errors == {"busy": 3}
    assert found.fairness == 0.5
    assert found.worker_cpu_us == pytest.approx(0.5 / 5 * 1e6)
    assert found.client_cpu_us == pytest.approx(1.2 / 5 * 1e6)


def test_clients_that_did_nothing_give_zeros() -> None:
    found = figures([Run([sample(), sample()], 1.0, None)])
    assert (found.operations, found.p999_ms, found.fairness, found.worker_cpu_us) == (0, 0.0, 0.0, None)


def test_quantiles_of_few_values() -> None:
    assert [quantile([1.0, 2.0, 3.0], q) for q in (0.0, 0.5, 0.999, 1.0)] == [1.0, 2.0, 3.0, 3.0]


def measured(kind: str, clients: int, *counts: int) -> Measured:
    runs = [Run([sample(*[0.001] * count)], 1.0, None) for count in counts]
    return Measured(kind, clients, figures(runs), [figures([run]) for run in runs])


def test_ratios_are_of_the_same_number_of_clients() -> None:
    [ratio] = ratios(
        [measured("worker", 8, 10, 30), measured("direct", 8, 10, 10), measured("bare", 32, 1, 1)]
    )
    assert (ratio.peer, ratio.clients, ratio.throughput, ratio.throughput_rounds) == (
        "direct",
        8,
        2.0,
        (1.0, 3.0),
    )


def test_more_clients_are_compared_with_the_first_number_of_them() -> None:
    found = ratios(
        [measured("worker", 32, 20, 40), measured("worker", 128, 30, 20), measured("worker", 1, 5, 1)]
    )
    assert [(one.peer, one.clients, one.throughput, one.throughput_rounds) for one in found] == [
        ("worker, 32 clients", 128, 50 / 60, (0.5, 1.5)),
        ("worker, 32 clients", 1, 0.1, (1 / 40, 0.25)),
    ]
    assert ratios([measured("worker", 32, 20, 40)]) == []


def counting(start: object, count: int) -> Sample:
    assert callable(start)
    start()
    recorder = Recorder()
    recorder.latencies_s.extend([0.5] * count)
    return recorder.sample()


def failing(_start: object) -> Sample:
    raise SystemExit(3)


@pytest.mark.worker
def test_processes_start_together_and_give_their_samples() -> None:
    run = run_clients(SPAWNED, counting, [(1,), (2,)])
    assert sorted(one.operations for one in run.samples) == [1, 2]


@pytest.mark.worker
def test_a_client_that_ends_early_fails_the_run() -> None:
    with pytest.raises(ClientFailedError):
        run_clients(SPAWNED, failing, [(), ()])
