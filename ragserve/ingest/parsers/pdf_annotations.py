"""What lies on the pages of a PDF: values of form fields, notes and text boxes; the names of attached
files."""

from __future__ import annotations

import ctypes
import re
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from ragserve.ingest.parsers.base import one_line

_HIDDEN = 0x02 | 0x20  # flags: hidden, not shown on screens
_PASSWORD = 1 << 13  # flag of a text field
_NUMBERED = re.compile(r"\[\d+\]")  # of names in forms that Adobe's LiveCycle wrote
_MOST_CHARS = 100_000  # of one string


def annotation_lines(
    document: Any, page: Any, left_out: Counter[str], *, hidden: bool, comments: bool
) -> list[str]:
    """The lines that a page's annotations add to its text: ``Name: value`` of each form field, text boxes,
    and ``[Comment by NAME: ...]``. What is not taken is counted in ``left_out``."""
    import pypdfium2.raw as pdfium

    lines: dict[str, None] = {}  # a field that is shown twice on a page is read once
    for at in range(pdfium.FPDFPage_GetAnnotCount(page)):
        annotation = pdfium.FPDFPage_GetAnnot(page, at)
        if not annotation:
            continue
        try:
            kind = pdfium.FPDFAnnot_GetSubtype(annotation)
            if kind == pdfium.FPDF_ANNOT_WIDGET:
                line = _field(document.formenv, annotation)
            elif kind in (pdfium.FPDF_ANNOT_LINK, pdfium.FPDF_ANNOT_POPUP):
                continue
            else:
                line = _note(annotation, boxed=kind == pdfium.FPDF_ANNOT_FREETEXT)
            if not line:
                continue
            if pdfium.FPDFAnnot_GetFlags(annotation) & _HIDDEN and not hidden:
                left_out["hidden passages"] += 1
            elif line.startswith("[Comment") and not comments:
                left_out["comments"] += 1
            else:
                lines[line] = None
        finally:
            pdfium.FPDFPage_CloseAnnot(annotation)
    return list(lines)


def attached_files(document: Any) -> list[str]:
    """The names of the files that are attached to a document."""
    names = (document.get_attachment(at).get_name() for at in range(document.count_attachments()))
    return [one_line(name) for name in names]


def _note(annotation: Any, *, boxed: bool) -> str:
    text = _value(annotation, b"Contents").strip()
    if boxed or not text:
        return text
    author = one_line(_value(annotation, b"T"))
    return f"[Comment by {author}: {text}]" if author else f"[Comment: {text}]"


def _field(form: Any, annotation: Any) -> str:
    """A form field as ``Name: value``; empty without a value, and for buttons and passwords."""
    import pypdfium2.raw as pdfium

    if not form:
        return ""
    kind = pdfium.FPDFAnnot_GetFormFieldType(form, annotation)
    flags = pdfium.FPDFAnnot_GetFormFieldFlags(form, annotation)
    value = ""
    if kind == pdfium.FPDF_FORMFIELD_TEXTFIELD and not flags & _PASSWORD:
        value = _string(pdfium.FPDFAnnot_GetFormFieldValue, form, annotation)
    elif kind in (pdfium.FPDF_FORMFIELD_COMBOBOX, pdfium.FPDF_FORMFIELD_LISTBOX):
        value = ", ".join(_chosen(form, annotation))
        value = value or _string(pdfium.FPDFAnnot_GetFormFieldValue, form, annotation)
    elif kind in (pdfium.FPDF_FORMFIELD_CHECKBOX, pdfium.FPDF_FORMFIELD_RADIOBUTTON):
        ticked = pdfium.FPDFAnnot_IsChecked(form, annotation)
        own = _string(pdfium.FPDFAnnot_GetFormFieldExportValue, form, annotation)
        if kind == pdfium.FPDF_FORMFIELD_CHECKBOX:
            several = pdfium.FPDFAnnot_GetFormControlCount(form, annotation) > 1
            value = (own if several else "yes") if ticked else ("" if several else "no")
        elif ticked:
            value = own
    if not value.strip():
        return ""
    name = _string(pdfium.FPDFAnnot_GetFormFieldAlternateName, form, annotation).strip()
    if not name:
        path = _string(pdfium.FPDFAnnot_GetFormFieldName, form, annotation)
        name = _NUMBERED.sub("", path).rsplit(".", 1)[-1]
    return f"{one_line(name).rstrip(':')}: {value.strip()}"


def _chosen(form: Any, annotation: Any) -> Iterator[str]:
    import pypdfium2.raw as pdfium

    for at in range(max(0, pdfium.FPDFAnnot_GetOptionCount(form, annotation))):
        if pdfium.FPDFAnnot_IsOptionSelected(form, annotation, at):
            yield _string(lambda *rest, at=at: pdfium.FPDFAnnot_GetOptionLabel(form, annotation, at, *rest))


def _value(annotation: Any, key: bytes) -> str:
    import pypdfium2.raw as pdfium

    return _string(pdfium.FPDFAnnot_GetStringValue, annotation, key)


def _string(get: Callable[..., int], *arguments: Any) -> str:
    """A string that PDFium writes as UTF-16 into a buffer; it first says how long that must be, in bytes."""
    size = min(get(*arguments, None, 0), 2 * _MOST_CHARS)
    if size <= 2:
        return ""
    buffer = ctypes.create_string_buffer(size + size % 2)
    pointer = ctypes.cast(buffer, ctypes.POINTER(ctypes.c_ushort))
    get(*arguments, pointer, size)
    text = buffer.raw.decode("utf-16-le", "replace").split("\0", 1)[0]
    return text.replace("\r\n", "\n").replace("\r", "\n")
