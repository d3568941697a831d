"""What a namespace may set for its own queries. A request's own value comes before it, the server's
behind. Several namespaces that are asked together have what they set alike."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Protocol, Self, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ragserve.config import StrategyName
from ragserve.errors import InvalidRequest
from ragserve.setting_groups.answering import NotFound, Retrieval
from ragserve.strategy_spec import one_label

if TYPE_CHECKING:
    from ragserve.config import Settings

_SERVERS = {"k": "top_k"}  # names of settings that differ from the field's
_NEW = (None, "new")  # sessions of a query that has no earlier turn
Strategy = Annotated[str, AfterValidator(lambda text: one_label(text, get_args(StrategyName)))]


class HasSettings(Protocol):
    """The part of `IndexStore` that is read here."""

    def settings(self, name: str) -> Mapping[str, Any]: ...


class NamespaceSettings(BaseModel):
    """Defaults of a namespace's queries; null leaves one to the server."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    system: str | None = Field(None, max_length=8192, description="Replaces the system text.")
    k: int | None = Field(None, ge=1, le=64, description="Passages of a query that names no number.")
    min_score: float | None = Field(None, description="Lowest score of a passage, see `/rag/query`.")
    retrieval: Retrieval | None = Field(None, description="Search: `dense`, `lexical` or `hybrid`.")
    not_found: NotFound | None = Field(
        None, description="Where the passages do not seem to answer: `note`, `refuse` or `off`."
    )
    strategy: Strategy | None = Field(
        None,
        max_length=1024,
        description="Strategy with its options, as in `concat:recompute=sentences,share=0.15`.",
    )

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Self:
        """Those of a registry, in which a later version may have stored more."""
        return cls(**{name: stored[name] for name in cls.model_fields.keys() & stored.keys()})

    @classmethod
    def shared(cls, each: Mapping[str, NamespaceSettings], asked: Collection[str] = ()) -> NamespaceSettings:
        """Those of a question over several namespaces, by name: what all of them have alike. A field in which
        they differ is the request's to give: ``asked`` has those that it does.

        Raises InvalidRequest for another field that they differ in."""
        alike: dict[str, Any] = {}
        for field in cls.model_fields:
            values = {name: getattr(own, field) for name, own in each.items()}
            first = next(iter(values.values()))
            if any(value != first for value in values.values()):
                if field in asked:
                    continue
                set_by = [name for name, value in values.items() if value is not None]
                raise InvalidRequest(
                    f"The namespaces differ in their setting {field!r}, which {', '.join(set_by)} "
                    f"{'has' if len(set_by) == 1 else 'have'}.",
                    hint=f"Give {field} with the request, or set it alike in all of them.",
                    code="namespace_settings_differ",
                    param="namespaces",
                )
            alike[field] = first
        return cls(**alike)

    def given(self) -> dict[str, Any]:
        """The fields that are set, to be stored."""
        return self.model_dump(exclude_none=True)

    def over(self, settings: Settings) -> Settings:
        """The server's settings with these in their place, but for the system text."""
        given = {name: value for name, value in self.given().items() if name != "system"}
        if not given:
            return settings
        found = settings.model_copy(update={_SERVERS.get(name, name): value for name, value in given.items()})
        found.__dict__.pop("default_strategy", None)  # cached for the server's
        return found

    @classmethod
    def usual(
        cls, settings: Settings, store: HasSettings, namespace: str, given: Collection[str] = ()
    ) -> Settings:
        """The settings of a namespace's queries that give none: the server's, and its own in their place, but
        for the settings ``given``, which come before its own."""
        before = {field: None for field in cls.model_fields if _SERVERS.get(field, field) in given}
        return cls.of(store.settings(namespace)).model_copy(update=before).over(settings)

    def system_text(self, asked: str | None, session: str | None) -> str | None:
        """The system text of a query: what it asks for itself, else the namespace's. A later turn keeps that
        of its session."""
        return self.system if asked is None and session in _NEW else asked
