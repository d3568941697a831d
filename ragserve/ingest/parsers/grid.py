"""Tables whose cells span rows and columns, laid out as a grid."""

from __future__ import annotations

_MOST_COLUMNS = 16384  # Excel's; a table that claims more says nothing true


class Grid:
    """Takes cells in the order of a file, row by row, and gives each the columns that a reader sees it in.

    A cell that spans rows or columns has its text in the first place of them, and blanks in the others.
    """

    def __init__(self) -> None:
        self._rows: list[list[str]] = []
        self._free_from: list[int] = []  # for each column, the first row that no cell above reaches into

    def add(self, row: int, text: str, rowspan: int = 1, colspan: int = 1) -> None:
        """Put a cell into the first free column of ``row``, from 0, behind the cells that it has.

        Rows must come in order. A column that has no cell, such as w:gridBefore, is a cell without text.
        """
        while len(self._rows) <= row:
            self._rows.append([])
        cells = self._rows[row]
        while len(cells) < len(self._free_from) and self._free_from[len(cells)] > row:
            cells.append("")
        first = len(cells)
        span = max(1, min(colspan, _MOST_COLUMNS - first))
        cells += [text, *[""] * (span - 1)]
        self._free_from += [0] * (len(cells) - len(self._free_from))
        self._free_from[first : first + span] = [row + max(1, rowspan)] * span

    def rows(self) -> list[list[str]]:
        """The texts of the cells: all rows of one length."""
        width = max(map(len, self._rows), default=0)
        return [cells + [""] * (width - len(cells)) for cells in self._rows]
