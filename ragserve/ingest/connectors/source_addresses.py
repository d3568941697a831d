"""Addresses of folders elsewhere: ``s3://BUCKET/FOLDER`` and ``git+https://HOST/REPOSITORY#BRANCH:FOLDER``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from ragserve.errors import InvalidRequest

_MAX = 2048  # characters
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,254}")
_PROFILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")
_TRANSPORTS = ("https", "http", "ssh", "file")
_NO_BRANCH = re.compile(r"[\s~^:?*\[\\]|\.\.|@\{|//|^[-/.]|[/.]$|\.lock$")  # as git check-ref-format has it
_S3_FORM = "Write s3://BUCKET/FOLDER, or s3://PROFILE@BUCKET/FOLDER with a profile of the AWS configuration."
_GIT_FORM = "Write git+https://HOST/REPOSITORY#BRANCH:FOLDER; #BRANCH and :FOLDER may be left out."


@dataclass(frozen=True, slots=True)
class S3Address:
    """A folder of a bucket, or all of it with an empty ``folder``; ``profile`` names credentials."""

    bucket: str
    folder: str = ""
    profile: str = ""

    @property
    def container(self) -> str:
        """What the source of each object begins with, before its key."""
        return f"s3://{self.profile}@{self.bucket}/" if self.profile else f"s3://{self.bucket}/"

    def __str__(self) -> str:
        return self.container + self.folder


@dataclass(frozen=True, slots=True)
class GitAddress:
    """A folder of a branch, or tag, of a repository; ``HEAD`` is the repository's default branch."""

    url: str
    branch: str = "HEAD"
    folder: str = ""

    @property
    def container(self) -> str:
        """What the source of each file begins with, before its path in the repository."""
        return f"git+{self.url}#{self.branch}:"

    def __str__(self) -> str:
        return self.container + self.folder


Address = S3Address | GitAddress


def is_elsewhere(text: str) -> bool:
    """Return whether ``text`` is meant as the address of a folder elsewhere."""
    return text.lower().startswith(("s3://", "git+", "git://", "git@", "ext::"))


def parse_address(text: str) -> Address:
    """Parse an address, whose text is then its normal form. Raises ``InvalidRequest``, which never repeats
    a password."""
    if len(text) > _MAX or not text.isprintable():
        raise InvalidRequest(f"An address has at most {_MAX:,} printable characters.", param="urls")
    scheme, _, rest = text.partition("://")
    if scheme.lower() == "s3":
        return _s3(rest)
    if scheme.lower().startswith("git+") and scheme[4:].lower() in _TRANSPORTS:
        return _git(scheme[4:].lower(), rest)
    transports = ", ".join(f"git+{each}://" for each in _TRANSPORTS)
    raise InvalidRequest(f"Folders elsewhere are s3://, {transports}.", hint=_GIT_FORM, param="urls")


def _s3(rest: str) -> S3Address:
    place, _, folder = rest.partition("/")
    profile, at, bucket = place.rpartition("@")
    if ":" in place:
        raise _secret("an S3 address", "Name a profile of the AWS configuration, or set AWS_* variables.")
    if not _BUCKET.fullmatch(bucket) or (at and not _PROFILE.fullmatch(profile)):
        raise InvalidRequest("The address names no bucket.", hint=_S3_FORM, param="urls")
    return S3Address(bucket, _folder(folder), profile)


def _git(transport: str, rest: str) -> GitAddress:
    place, _, fragment = rest.partition("#")
    url = f"{transport}://{place}".rstrip("/")
    branch, _, folder = fragment.partition(":")
    try:
        parts = urlsplit(url)
        host, password = parts.hostname, parts.password
        _ = parts.port
    except ValueError as error:
        raise InvalidRequest(
            "The address of the repository is no URL.", hint=_GIT_FORM, param="urls"
        ) from error
    if password is not None or "?" in place or (parts.username is not None and transport != "ssh"):
        raise _secret("a git address", "Use git's credential helper, ~/.netrc or an SSH key.")
    if transport == "file":
        wrong = bool(parts.netloc) or not parts.path.startswith("/")
    else:
        wrong = not host or host.startswith("-") or (parts.username or "").startswith("-")
    if wrong or " " in url or len(parts.path) < 2:
        raise InvalidRequest("The address names no repository.", hint=_GIT_FORM, param="urls")
    if branch and (_NO_BRANCH.search(branch) or not branch.isprintable()):
        raise InvalidRequest(f"{branch[:80]!r} is no name of a branch or tag.", hint=_GIT_FORM, param="urls")
    return GitAddress(url, branch or "HEAD", _folder(folder).lstrip("/"))


def _folder(path: str) -> str:
    if any(part in (".", "..") for part in path.split("/")):
        raise InvalidRequest("A folder's path has no . and no .. in it.", param="urls")
    return path.rstrip("/")


def _secret(where: str, instead: str) -> InvalidRequest:
    return InvalidRequest(f"Leave user, password and token out of {where}.", hint=instead, param="urls")


def covers(allowed: Address, asked: Address) -> bool:
    """Return whether ``asked`` is ``allowed`` or a folder in it: of the same bucket and profile, or of the
    same branch of a repository."""
    if allowed.container != asked.container:
        return False
    return not allowed.folder or f"{asked.folder}/".startswith(f"{allowed.folder}/")
