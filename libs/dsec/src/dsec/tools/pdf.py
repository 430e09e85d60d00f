"""``pdf_parser``: the text of PDF documents."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsec.tools.tool import Tool, tool_call
from dsec_common.errors import DsecError, ErrorCode, from_os_error, invalid

DOCUMENT_MAX_BYTES: Final = 64 * 1024 * 1024


@dataclass(frozen=True)
class PdfText:
    """A document's text.

    Attributes:
        pages: the text of each page, in order.
    """

    pages: tuple[str, ...]

    @property
    def text(self) -> str:
        """All of it, the pages apart by a form feed."""
        return "\f".join(self.pages)


class PdfParser(Tool):
    """``pdf_parser``. It needs ``read_file``, and the package ``pypdf`` (``dsec[pdf]``)."""

    @tool_call("read_file")
    def parse(self, document: str | Path | bytes, *, password: str = "") -> PdfText:
        """Return the text of a file, or of a document that is at hand.

        Raises:
            DsecError: ``not_found`` without the file; ``invalid`` for what is no PDF, or one that
                the password does not open; ``exhausted`` for one longer than 64 MiB;
                ``unsupported`` without ``pypdf``.
        """
        try:
            import pypdf  # noqa: PLC0415  an extra
            from pypdf.errors import PyPdfError  # noqa: PLC0415  same
        except ImportError:
            raise DsecError(
                ErrorCode.UNSUPPORTED, "pdf_parser needs pypdf; install dsec[pdf]"
            ) from None
        data = document if isinstance(document, bytes) else _read(Path(document))
        if len(data) > DOCUMENT_MAX_BYTES:
            raise DsecError(
                ErrorCode.EXHAUSTED,
                f"the document is longer than {DOCUMENT_MAX_BYTES} bytes",
                retryable=False,
            )
        try:
            reader = pypdf.PdfReader(io.BytesIO(data), password=password or None)
            pages = tuple(page.extract_text() for page in reader.pages)
        except (PyPdfError, ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            raise invalid(f"this cannot be read as a PDF: {error}") from error
        self.note(pages=str(len(pages)))
        return PdfText(pages)


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as source:
            return source.read(DOCUMENT_MAX_BYTES + 1)
    except OSError as error:
        raise from_os_error("read", error, str(path)) from error
