"""A namespace's index file: read it if it is this registry's, write it unless a newer one is there."""

from __future__ import annotations

import logging
from pathlib import Path

from ragserve.errors import StorageFull
from ragserve_index import registry, structures
from ragserve_index.database import Connection, Database
from ragserve_index.index import file_format
from ragserve_index.index.file_format import Damaged, Footer
from ragserve_index.locks import file_lock
from ragserve_index.structures.base import Structure, load_faiss

log = logging.getLogger(__name__)


class IndexFile:
    """The file of one namespace. Several processes may read and write it at once."""

    def __init__(self, database: Database, directory: Path, ns: registry.Namespace) -> None:
        self.path = file_format.index_path(directory, ns.id)
        self._lock = directory / ".lock"
        self._namespace_id = ns.id
        self._name = ns.name
        self._uid = ns.uid
        self._dim = ns.dim
        self._database = database

    def load(self, connection: Connection, ns: registry.Namespace) -> tuple[Structure, Footer] | None:
        """Read the saved structure; None without a file. Raises Damaged for a file that cannot be used."""
        with file_lock(self._lock):  # nobody replaces the file between its check and its reading
            footer = file_format.read_footer(self.path, verify=True)
            if footer is None:
                return None
            self._must_be_ours(footer, connection, ns)
            try:
                structure = structures.load(
                    footer.structure, load_faiss().read_index(str(self.path)), footer.state
                )
            except (ValueError, KeyError, RuntimeError) as error:
                raise Damaged(str(error)) from error
        if structure.dim != self._dim:
            raise Damaged(f"its vectors have {structure.dim} components instead of {self._dim}")
        return structure, footer

    def status(self, connection: Connection, ns: registry.Namespace) -> str:
        """Check every byte of the file. Returns `current`, `behind`, `missing`, or `damaged: reason`."""
        try:
            footer = file_format.read_footer(self.path, verify=True)
            if footer is None:
                return "missing"
            if footer.namespace_uid == ns.uid and footer.index_type != ns.index_type:
                return "behind"
            self._must_be_ours(footer, connection, ns)
        except Damaged as error:
            return f"damaged: {error}"
        return "current" if footer.version == ns.version else "behind"

    def _must_be_ours(self, footer: Footer, connection: Connection, ns: registry.Namespace) -> None:
        """Raise Damaged unless the file holds a version of this namespace that the registry went through."""
        if footer.namespace_uid != ns.uid or footer.dim != ns.dim:
            raise Damaged("it is another namespace's")
        if footer.index_type != ns.index_type:
            raise Damaged(f"it has type {footer.index_type}, the namespace now has type {ns.index_type}")
        if registry.stamp_of(connection, ns.id, footer.version) != footer.stamp:
            raise Damaged(f"its version {footer.version} is not the registry's, which is at {ns.version}")

    def save(
        self,
        structure: Structure,
        version: int,
        stamp: int | None,
        changed: int,
        index_type: str,
        *,
        force: bool = False,
    ) -> Footer | None:
        """Write the file and prune the change log up to its version. Returns the footer of a file that is as
        new and was kept, else None.

        ``force`` replaces a file of the same version. Raises StorageFull or Unavailable, leaving the old file
        as it was, and NotFound once the namespace is dropped, leaving none."""
        with file_lock(self._lock):
            there = self.ours_on_disk()
            if there is not None and (there.version > version or (there.version == version and not force)):
                return there
            footer = Footer(
                namespace_uid=self._uid,
                version=version,
                stamp=stamp,
                changed=changed,
                index_type=index_type,
                structure=structure.name,
                dim=self._dim,
                count=structure.count,
                state=structure.state(),
            )
            file_format.write(self.path, footer, structure.write)
            self._remove_if_dropped()
        try:
            self._prune_log(version)
        except StorageFull as error:  # the file is saved; the next save prunes
            log.warning("The change log of namespace %s was not pruned: %s", self._name, error)
        return None

    def _remove_if_dropped(self) -> None:
        """Remove the file if the namespace was dropped while it was written: who dropped it has removed the
        one before. Raises NotFound then."""
        with self._database.read() as connection:
            if not registry.namespaces(connection, "uid = ?", self._uid):
                self.path.unlink(missing_ok=True)
                raise registry.namespace_not_found(self._name)

    def _prune_log(self, version: int) -> None:
        """Indexes of other processes that are older than ``version`` compare ids from now on."""
        with self._database.write() as connection:
            kept = version - connection.dialect.stamps_kept
            for statement, until in (
                ("DELETE FROM removals WHERE namespace_id = ?1 AND version <= ?2", version),
                ("DELETE FROM versions WHERE namespace_id = ?1 AND version < ?2", kept),
                ("UPDATE namespaces SET log_floor = ?2 WHERE id = ?1 AND log_floor < ?2", version),
            ):
                connection.execute(statement, (self._namespace_id, until))

    def ours_on_disk(self) -> Footer | None:
        """The footer if the file is this registry's, without reading the payload; None otherwise."""
        try:
            footer = file_format.read_footer(self.path)
            if footer is None:
                return None
            with self._database.read() as connection:
                ns = registry.namespace_by_id(connection, self._namespace_id, self._name)
                self._must_be_ours(footer, connection, ns)
        except Damaged:
            return None
        return footer
