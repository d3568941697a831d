"""What a user may do and see, by the groups that the provider names."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ragserve.errors import InvalidRequest
from ragserve.tenants.key_file import ALL, MAX_KEY_LABELS, KeyLimits, Pattern, Right
from ragserve.tenants.principal import Grant, Principal
from ragserve_index.viewers import EVERY_LABEL, EVERYTHING, Viewer, checked_labels

MOST_GROUPS = 1_000
"""Groups of the setting."""

_MOST_CLAIMED = 10_000  # groups of a token that are looked at
_NAME_CHARS = 64


class GroupGrant(BaseModel):
    """The rights of a group's members, as those of an API key."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    namespaces: tuple[Pattern, ...] = ()
    rights: frozenset[Right] = Field(min_length=1)
    labels: tuple[str, ...] = ()
    limits: KeyLimits = KeyLimits()

    @field_validator("labels")
    @classmethod
    def _known_labels(cls, labels: tuple[str, ...]) -> tuple[str, ...]:
        if EVERY_LABEL in labels:
            return (EVERY_LABEL,)
        try:
            return checked_labels(labels, MAX_KEY_LABELS)
        except InvalidRequest as error:
            raise ValueError(str(error)) from None

    @model_validator(mode="after")
    def _fits_its_rights(self) -> GroupGrant:
        everywhere = self.rights & {"admin", "metrics"}
        if everywhere and self.namespaces not in ((), (ALL,)):
            raise ValueError(f"{min(everywhere)} covers the whole server: give it without namespaces")
        if not self.namespaces and "admin" not in self.rights and self.rights != {"metrics"}:
            raise ValueError('name its namespaces, ["*"] for all')
        return self

    @property
    def grant(self) -> Grant:
        """The rights as a principal has them."""
        return Grant(self.namespaces or ((ALL,) if "admin" in self.rights else ()), self.rights)


def group_grants(setting: Mapping[str, Any]) -> dict[str, GroupGrant]:
    """The setting ``oidc_groups``, checked. Raises ``ValueError`` with one line."""
    if len(setting) > MOST_GROUPS:
        raise ValueError(f"{len(setting):,} groups; at most {MOST_GROUPS:,}")
    found = {}
    for group, fields in setting.items():
        try:
            found[group] = GroupGrant.model_validate(fields)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, (group, *first["loc"])))
            raise ValueError(f"{place}: {str(first['msg']).removeprefix('Value error, ')}") from None
    return found


def claimed_groups(claims: Mapping[str, Any], name: str) -> list[str]:
    """The groups that a token names: the claim of this name, or field ``b`` of claim ``a`` for ``a.b``."""
    value: Any = claims.get(name)
    if value is None and "." in name:
        value = claims
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, str):
        return [value]
    return (
        [each for each in value[:_MOST_CLAIMED] if isinstance(each, str)] if isinstance(value, list) else []
    )


def principal_of(
    issuer: str, subject: str, name: str, groups: Iterable[str], known: Mapping[str, GroupGrant]
) -> Principal | None:
    """Who a user is; None for one who is in no group of the setting.

    Rights hold in the namespaces of their group. Labels of all groups are held together, and a limit is the
    highest of them; without one in some group there is none."""
    own = [known[group] for group in dict.fromkeys(groups) if group in known]
    if not own:
        return None
    digest = hashlib.blake2b(f"{issuer}\0{subject}".encode(), digest_size=12).hexdigest()
    admin = any("admin" in each.rights for each in own)
    viewer = EVERYTHING if admin else Viewer.holding(label for each in own for label in each.labels)
    shown = "".join(c for c in name or subject if c.isprintable())[:_NAME_CHARS]
    grants = tuple(each.grant for each in own)
    return Principal(f"sso_{digest}", shown, grants, viewer, _highest([each.limits for each in own]))


def _highest(limits: Sequence[KeyLimits]) -> KeyLimits:
    fields: dict[str, int | None] = {}
    for name in KeyLimits.model_fields:
        values = [getattr(each, name) for each in limits]
        fields[name] = None if None in values else max(values)
    return KeyLimits(**fields)
