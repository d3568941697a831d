"""PDFs with what parsers have lost, written object by object."""

from __future__ import annotations

from tests.data.formats.office_parts import Sample

_FONT = "<</Type/Font/Subtype/Type1/BaseFont/Helvetica/Encoding/WinAnsiEncoding>>"
_LEFT, _TOP, _LINE = 60, 740, 16  # points


def pdf(pages: list[str], annotations: tuple[str, ...] = (), fields: int = 0) -> bytes:
    """A PDF with the content of its pages; annotations lie on the first one, and the first ``fields`` of them
    are fields of a form."""
    first = 3 + 2 * len(pages)
    refs = " ".join(f"{first + at} 0 R" for at in range(len(annotations)))
    form = " ".join(f"{first + at} 0 R" for at in range(fields))
    kids = " ".join(f"{3 + 2 * at} 0 R" for at in range(len(pages)))
    acro = f"/AcroForm<</Fields[{form}]/DA(/F1 12 Tf)/DR<</Font<</F1 {_FONT}>>>>>>" if fields else ""
    objects = [
        f"<</Type/Catalog/Pages 2 0 R{acro}>>",
        f"<</Type/Pages/Kids[{kids}]/Count {len(pages)}>>",
    ]
    for at, content in enumerate(pages):
        own = f"/Annots[{refs}]" if refs and not at else ""
        objects += [
            f"<</Type/Page/Parent 2 0 R/MediaBox[0 0 600 800]/Contents {4 + 2 * at} 0 R{own}"
            f"/Resources<</Font<</F1 {_FONT}>>>>>>",
            f"<</Length {len(content)}>>\nstream\n{content}\nendstream",
        ]
    objects += [
        f"<</Type/Annot/F 4/Rect[60 {600 - 40 * n} 250 {620 - 40 * n}]{each}>>"
        for n, each in enumerate(annotations)
    ]
    body, places = "%PDF-1.7\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(body))
        body += f"{number} 0 obj\n{each}\nendobj\n"
    table = "".join(f"{place:010} 00000 n \n" for place in places)
    end = f"xref\n0 {len(objects) + 1}\n0000000000 65535 f \n{table}"
    end += f"trailer\n<</Root 1 0 R/Size {len(objects) + 1}>>\nstartxref\n{len(body)}\n%%EOF\n"
    return (body + end).encode("cp1252")


def lines(*texts: str, top: int = _TOP, before: str = "") -> str:
    """Lines of text from ``top`` down; ``before`` sets how they are painted."""
    shown = "".join(f"({_escaped(text)}) Tj T* " for text in texts)
    return f"BT {before} /F1 12 Tf {_LINE} TL {_LEFT} {top} Td {shown}ET"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)")


def hyphens() -> Sample:
    written = (
        "The committee is a price-",
        "determining body, and the infor-",
        "mation of part AB-",
        "4410 is for non-",
        "EU ships, from anne-",
        "marie@example.org and 2019-",
        "2020. The self-",
        "employed pilots of the har-",
        "bour know the self-employed.",
    )
    text = (
        "The committee is a price-determining body, and the information of part AB-4410 is for non-EU ships, "
        "from anne-marie@example.org and 2019-\n2020. The self-employed pilots of the harbour know the "
        "self-employed."
    )
    return Sample(pdf([lines(*written)]), text)


def scripts() -> Sample:
    """Raised and lowered text, and the number of a note."""
    content = (
        "BT /F1 12 Tf 60 740 Td (The dose is 10) Tj /F1 7 Tf 5 Ts (6) Tj /F1 12 Tf 0 Ts ( units of H) Tj "
        "/F1 7 Tf -3 Ts (2) Tj /F1 12 Tf 0 Ts (O, as stated) Tj /F1 7 Tf 5 Ts (3) Tj /F1 12 Tf 0 Ts "
        "( here.) Tj ET"
    )
    return Sample(pdf([content]), "The dose is 10^6 units of H_2O, as stated[3] here.")


def hidden() -> Sample:
    content = [
        lines("The gate opens at seven."),
        lines("marzipan 0000", top=700, before="3 Tr"),
        "0 Tr 1 1 1 rg " + lines("marzipan 0001", top=680),
        "0 0 0 rg BT /F1 0.4 Tf 60 660 Td (marzipan 0002) Tj ET",
        "0 0 0.5 rg 50 630 200 20 re f 1 1 1 rg " + lines("White on navy.", top=635),
    ]
    return Sample(
        pdf(["\n".join(content)]),
        "The gate opens at seven.\nWhite on navy.",
        "left out: 1 hidden passages",
        "marzipan 0000 0001 0002",
    )


def form() -> Sample:
    fields = (
        "/Subtype/Widget/FT/Tx/T(Licence)/V(KX-4410)",
        "/Subtype/Widget/FT/Tx/T(form1[0].Applicant[0])/TU(Name of applicant:)/V(Isla Drever)",
        "/Subtype/Widget/FT/Btn/T(Insured)/V/Yes/AS/Yes/AP<</N<</Yes null/Off null>>>>",
        "/Subtype/Widget/FT/Btn/T(Trailer)/V/Off/AS/Off/AP<</N<</Yes null/Off null>>>>",
        "/Subtype/Widget/FT/Ch/Ff 131072/T(Basin)/V(n)/Opt[[(n)(North)][(s)(South)]]",
    )
    text = (
        "Application for a mooring\nLicence: KX-4410\nName of applicant: Isla Drever\nInsured: yes\n"
        "Trailer: no\nBasin: North"
    )
    return Sample(pdf([lines("Application for a mooring")], fields, len(fields)), text)


def notes() -> Sample:
    annotations = (
        "/Subtype/FreeText/Contents(The box says nine)",
        "/Subtype/Text/T(Morag)/Contents(Check the rope)",
    )
    text = "Harbour rules\nThe box says nine\n[Comment by Morag: Check the rope]"
    return Sample(pdf([lines("Harbour rules")], annotations), text)


def pages() -> Sample:
    """A running head, numbers of pages, and a sentence that goes on over a page."""
    bodies = (
        ("All ships are emptied by noon. The holds must be emptied before",
         "the ferry reaches Tobermory, or the fee is doubled. It is paid at"),
        ("the office. The pilots wait at the outer buoy in every weather.",),
        ("The last berth is for the lifeboat only, and never let.",),
    )  # fmt: skip
    bodies = (bodies[0][:1], (bodies[0][1], *bodies[1]), bodies[2])
    content = [
        "\n".join([
            lines("Harbour rules of Oban"), lines(*body, top=700), lines(f"Page {at} of 3", top=40)
        ])
        for at, body in enumerate(bodies, 1)
    ]  # fmt: skip
    text = (
        "Harbour rules of Oban\nAll ships are emptied by noon. The holds must be emptied before\n\n"
        "the ferry reaches Tobermory, or the fee is doubled. It is paid at the office. The pilots wait at "
        "the outer buoy in every weather.\n\nThe last berth is for the lifeboat only, and never let."
    )
    return Sample(pdf(content), text)


def samples() -> dict[str, Sample]:
    return {
        "hyphens.pdf": hyphens(),
        "scripts.pdf": scripts(),
        "hidden.pdf": hidden(),
        "form.pdf": form(),
        "notes.pdf": notes(),
        "pages.pdf": pages(),
    }
