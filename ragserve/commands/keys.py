"""`ragserve keys`: make, list and revoke API keys of a data folder."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, cast, get_args

import typer

from ragserve.commands.job_console import print_json
from ragserve.commands.options import AsJson, say, with_settings
from ragserve.config import Settings
from ragserve.errors import InvalidRequest
from ragserve.tenants.audit_log import record_command
from ragserve.tenants.key_file import KeyFile, KeyLimits, Right, TenantKey

_HELP = (
    "Make, list and revoke API keys of a data folder. A running server notices changes with its next request."
)
_DAYS = re.compile(r"(\d{1,5})d")
_SHOWN_LIMITS = {
    "requests_per_minute": "{:,} requests a minute",
    "tokens_per_minute": "{:,} tokens a minute",
    "concurrent_requests": "{:,} at once",
    "max_upload_bytes": "uploads up to {:,} bytes",
    "max_k": "k up to {:,}",
}


def register(app: typer.Typer) -> None:
    keys = typer.Typer(help=_HELP, no_args_is_help=True)
    keys.command("create")(with_settings(create, ["data_dir"]))
    keys.command("list")(with_settings(list_, ["data_dir"]))
    keys.command("label")(with_settings(label, ["data_dir"]))
    keys.command("revoke")(with_settings(revoke, ["data_dir"]))
    app.add_typer(keys, name="keys")


def create(
    settings: Settings,
    name: Annotated[str, typer.Argument(help="Who will use the key: shown by list and in the audit log.")],
    right: Annotated[
        list[str], typer.Option(help="read, ingest, delete, metrics or admin (all, everywhere). Repeatable.")
    ],
    namespace: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            "-n",
            help="A namespace, or the beginning of names and *. Repeatable. Default: all.",
        ),
    ] = None,
    expires: Annotated[
        str | None, typer.Option(metavar="DAYSd|DATE", help="As 90d or 2027-12-31. Default: never.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Requests a minute.")] = None,
    tokens_per_minute: Annotated[
        int | None, typer.Option(min=1, help="Tokens of prompts and answers a minute.")
    ] = None,
    concurrent_requests: Annotated[int | None, typer.Option(min=1, help="Requests at once.")] = None,
    max_upload_bytes: Annotated[
        int | None, typer.Option(min=1, help="Largest body of an ingestion, bytes.")
    ] = None,
    max_k: Annotated[int | None, typer.Option(min=1, help="Most passages of a query.")] = None,
    label: Annotated[
        list[str] | None,
        typer.Option(help="See documents with this label, too; * for every label. Repeatable."),
    ] = None,
    labels_header: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For a gateway: it names its user's labels in this header of each request, with commas. Of "
            "the key's labels these count, and without the header none. Default of --label is * then.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make a key and print its secret, once: only a hash of it is kept."""
    if wrong := [each for each in right if each not in get_args(Right)]:
        raise InvalidRequest(
            f"There is no right {wrong[0]!r}.", hint=f"Rights are: {', '.join(get_args(Right))}."
        )
    limits = KeyLimits(
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_requests=concurrent_requests,
        max_upload_bytes=max_upload_bytes,
        max_k=max_k,
    )
    key, secret = KeyFile(settings.data_dir).create(
        name,
        namespace or [],
        cast("list[Right]", right),
        expires_at=None if expires is None else _moment(expires),
        limits=limits,
        labels=label or (["*"] if labels_header else []),
        labels_header=labels_header,
    )
    record_command(settings, "keys create", result="created", **_plain(key))
    if as_json:
        print_json({**_plain(key), "secret": secret})
        return
    say(_line(key))
    say("The secret is shown only now. Send it as the header 'Authorization: Bearer SECRET':")
    typer.echo(secret)


def label(
    settings: Settings,
    key: Annotated[str, typer.Argument(metavar="ID|NAME", help="Key to change.")],
    add: Annotated[list[str] | None, typer.Option(help="Give it this label. Repeatable.")] = None,
    remove: Annotated[list[str] | None, typer.Option(help="Take this label from it. Repeatable.")] = None,
) -> None:
    """Change a key's labels. Its next request goes by them, also in a session."""
    if not (add or remove):
        raise InvalidRequest("Say what to change: --add or --remove.")
    changed = KeyFile(settings.data_dir).relabel(key, add or (), remove or ())
    record_command(settings, "keys label", result="changed", **_plain(changed))
    typer.echo(_line(changed))


def list_(settings: Settings, as_json: AsJson = False) -> None:
    """List the keys, without their secrets, which are stored nowhere."""
    keys = KeyFile(settings.data_dir).read().keys
    if as_json:
        print_json([_plain(key) for key in keys])
        return
    for key in keys:
        typer.echo(_line(key))
    typer.echo(f"{len(keys):,} keys")


def revoke(
    settings: Settings, key: Annotated[str, typer.Argument(metavar="ID|NAME", help="Key to revoke.")]
) -> None:
    """Revoke a key: its next request is refused. Answers that are being sent end as usual."""
    revoked = KeyFile(settings.data_dir).revoke(key)
    record_command(settings, "keys revoke", result="revoked", **_plain(revoked))
    typer.echo(f"revoked {revoked.key_id} {revoked.name}")


def _moment(text: str) -> datetime:
    """Parse when a key expires. Raises InvalidRequest."""
    if days := _DAYS.fullmatch(text):
        return datetime.now(UTC).replace(microsecond=0) + timedelta(days=int(days[1]))
    try:
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):  # the latter: in UTC, it is before the year 1 or after 9999
        raise InvalidRequest(
            f"{text!r} is neither a number of days nor a date.", hint="As in --expires 90d or 2027-12-31."
        ) from None


def _plain(key: TenantKey) -> dict[str, Any]:
    """A key as JSON, without the digest."""
    plain = key.model_dump(mode="json", exclude={"digest"})
    return {**plain, "rights": sorted(key.rights), "limits": key.limits.model_dump(exclude_none=True)}


def _line(key: TenantKey) -> str:
    limits = key.limits.model_dump(exclude_none=True)
    facts = [", ".join(sorted(key.rights)), f"namespaces {', '.join(key.namespaces) or 'none'}"]
    facts += [f"labels {', '.join(key.labels)}"] if key.labels else []
    facts += [f"of them those in the header {key.labels_header}"] if key.labels_header else []
    facts += [_SHOWN_LIMITS[name].format(value) for name, value in limits.items()]
    if key.expires_at is not None:
        facts.append(f"{'expired' if key.expired else 'expires'} {key.expires_at:%Y-%m-%d %H:%M %Z}")
    return f"{key.key_id}  {key.name}: {'; '.join(facts)}"
