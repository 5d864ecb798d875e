"""JSON as canonical text, and bodies as they stand in a row."""

from typing import Any, Final

import msgspec

from ..protocol.errors import InvalidRequestError, RequestTooLargeError
from ..protocol.limits import INLINE_BYTES_MAX
from ..protocol.values import Value
from .bounds import PREVIEW_BYTES_MAX
from .records import JSON, TEXT, Body, PayloadRef

BODY_COLUMNS: Final = "content_type, retention_class, body, payload_sha256, payload_bytes, payload_stored_bytes, payload_encoding"
"""The columns of a body, in every table that has one, in the order of `Content.columns`."""

REFERENCE_COLUMNS: Final = (
    "payload_sha256, content_type, retention_class, payload_bytes, payload_stored_bytes, payload_encoding"
)
"""The same as the fields of a `PayloadRef`: what is selected behind a record's own columns."""

_PUT_LARGER: Final = (
    "put a larger one with payload_client.put or put_json and give the reference instead (see prepare_text)"
)

encode_json = msgspec.json.Encoder(order="deterministic").encode
"""The canonical JSON of a value that is known to be JSON."""

_decode = msgspec.json.decode


def canonical_json(value: Any, where: str) -> str:
    """The canonical JSON text of a value: keys sorted, no white space.

    Raises `InvalidRequestError` where the text would not say exactly the same: NaN, bytes, dates, keys that are no
    text.
    """
    try:
        encoded = encode_json(value)
        # What JSON has no word for is encoded as something else; only decoding shows it.
        is_same = _decode(encoded) == value
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise InvalidRequestError(f"{where} is no JSON: {error}") from error
    if not is_same:
        raise InvalidRequestError(
            f"{where} holds what JSON cannot say: a number that is not finite, bytes, a date, or a key that is no text"
        )
    return encoded.decode()


def encoded(text: str) -> bytes:
    """A text in UTF-8; `InvalidRequestError` where it has none."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError("the body holds a lone surrogate, which UTF-8 cannot carry") from error


def is_inline(text: str) -> bool:
    """Whether a text stands in a row and needs no payload; `InvalidRequestError` for one without UTF-8."""
    # A character takes 1 to 4 bytes, so that most texts need no encoding to be measured.
    if len(text) > INLINE_BYTES_MAX:
        return False
    return len(text) * 4 <= INLINE_BYTES_MAX or len(encoded(text)) <= INLINE_BYTES_MAX


def check_inline(text: str, where: str, remedy: str) -> None:
    """Raise `RequestTooLargeError` where a text is over what stands in a row; `remedy` says what to do then."""
    if not is_inline(text):
        size = len(encoded(text))
        raise RequestTooLargeError(
            f"{where} takes {size} bytes; up to {INLINE_BYTES_MAX} stand in a row; {remedy}",
            details={"inline_bytes": size, "inline_bytes_max": INLINE_BYTES_MAX},
        )


def attributes_json(attributes: dict[str, Any] | None) -> str:
    """Attributes as they are stored; refused where they are no JSON object or over what stands in a row."""
    if not attributes:
        return "{}"
    text = canonical_json(attributes, "the attributes")
    check_inline(text, "the JSON of the attributes", "put what is large into the event's body")
    return text


def preview_of(text: str) -> str:
    """The beginning of a text, cut at a character."""
    if len(text) * 4 <= PREVIEW_BYTES_MAX:
        return text
    return encoded(text[:PREVIEW_BYTES_MAX])[:PREVIEW_BYTES_MAX].decode(errors="ignore")


class Content(msgspec.Struct, frozen=True):
    """A body as it is stored: inline text or JSON, or a reference; and the preview of it."""

    content_type: str | None
    inline: str | None
    ref: PayloadRef | None
    preview: str

    def columns(self, retention_class: str) -> tuple[Value, ...]:
        """The values of `BODY_COLUMNS`; a payload has its own retention class."""
        ref = self.ref
        if ref is None:
            return self.content_type, retention_class, self.inline, None, None, None, None
        return (
            self.content_type,
            ref.retention_class,
            None,
            ref.sha256,
            ref.bytes,
            ref.stored_bytes,
            ref.encoding,
        )


NO_CONTENT: Final = Content(None, None, None, "")
EMPTY_TEXT: Final = Content(TEXT, "", None, "")


def text_content(text: Body, preview: str) -> Content:
    """The content of a text. `preview` is that of a reference; an inline text begins with its own."""
    if isinstance(text, PayloadRef):
        return Content(text.content_type, None, text, preview_of(preview))
    check_inline(text, "the text", _PUT_LARGER)
    return Content(TEXT, text, None, preview_of(text))


def json_content(value: Any, where: str) -> Content:
    """The content of a JSON value that stands in a row."""
    text = canonical_json(value, where)
    check_inline(text, f"the JSON of {where}", _PUT_LARGER)
    return Content(JSON, text, None, preview_of(text))
