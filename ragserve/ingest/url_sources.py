"""URLs among a job's sources: how they are fetched, and the pages that stand behind sitemaps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence

from ragserve.config import Settings
from ragserve.errors import Forbidden, InvalidRequest, RagserveError
from ragserve.ingest.connectors.source_addresses import Address, covers, is_elsewhere, parse_address
from ragserve.ingest.fetch import Fetcher
from ragserve.ingest.jobs.job_report import Interrupted
from ragserve.ingest.jobs.lease import JobRun
from ragserve.ingest.sitemap import is_sitemap, sitemap_urls
from ragserve.ingest.sources import is_url
from ragserve_index import JobStore
from ragserve_index.types import JobItem
from sglang_ext.wire.joint_names import matches

log = logging.getLogger(__name__)

KIND = "urls"
"""Kind of the jobs over URLs that a server's clients gave."""

_MAX_URL = 2048  # characters


def checked_urls(settings: Settings, namespace: str, urls: Sequence[str]) -> list[str]:
    """What a client gave, in its normal form. Raises ``Forbidden`` where clients may not have it fetched, and
    ``InvalidRequest``."""
    return [_checked(settings, namespace, url) for url in dict.fromkeys(urls)]


def _checked(settings: Settings, namespace: str, url: str) -> str:
    if is_elsewhere(url):
        address = parse_address(url)
        if not any(covers(each, address) for each in _allowed(settings, namespace)):
            raise Forbidden(
                f"This server brings no such folder into namespace {namespace!r} for its clients.",
                hint="The server's owner may allow it: RAGSERVE_CLIENT_SOURCES.",
                code="source_not_allowed",
            )
        return str(address)
    if settings.url_ingestion == "off":
        raise Forbidden("This server fetches no URLs for its clients.", hint="Send the files instead.")
    if not is_url(url) or len(url) > _MAX_URL or not url.isprintable():
        message = f"{url[:80]!r} is not an http or https URL of at most {_MAX_URL} characters."
        raise InvalidRequest(message, param="urls")
    return url


def _allowed(settings: Settings, namespace: str) -> Iterator[Address]:
    for pattern, addresses in settings.client_sources.items():
        if matches(namespace, pattern):
            yield from map(parse_address, addresses)


def fetcher_of(settings: Settings, run: JobRun) -> Fetcher:
    """The fetcher of a job: for clients of a server it connects to public addresses only."""
    allows = None
    if run.job.kind == KIND and settings.url_ingestion != "any":
        from ragserve.ingest.guarded_transport import is_public

        allows = is_public
    return Fetcher(
        max_bytes=int(run.job.spec.get("max_bytes") or settings.max_upload_bytes),
        allows=allows,
        robots=settings.robots == "honour",
        should_stop=run.should_stop,
    )


def follow_sitemaps(
    jobs: JobStore,
    run: JobRun,
    fetcher: Fetcher,
    limit: int,
    record: Callable[[Sequence[JobItem]], None],
) -> None:
    """Add the pages of the sitemaps that the job was given to its sources; ``limit`` for each. With the job's
    ``sitemap``, every URL given stands for a site. Raises ``Interrupted``."""
    spec, job_id = run.job.spec, run.job.job_id
    given = [
        url for url in spec.get("inputs", ()) if is_url(url) and (spec.get("sitemap") or is_sitemap(url))
    ]
    if not given:
        return
    pending = {item.source for item in jobs.items(job_id, "pending")}
    for url in filter(pending.__contains__, given):
        if run.should_stop():
            raise Interrupted
        try:
            found = sitemap_urls(fetcher, url, limit=limit, other_hosts=bool(spec.get("other_hosts")))
        except Exception as error:  # as in the planner: this source's failure
            if run.should_stop():
                raise Interrupted from error
            if not isinstance(error, RagserveError):
                log.exception("Reading the sitemap of %r failed", url)
            run.progress.failed += 1
            record([JobItem(url, "failed", str(error), 0, 0, 0, None)])
            continue
        # a site's address may be one of its pages: then the sitemap's own tells of the sitemap
        named = found.read[0] if url in found.urls else url
        jobs.add_items(job_id, [named, *found.urls])
        run.progress.skipped += 1
        record([JobItem(named, "skipped", found.summary(), 0, 0, 0, None)])
        run.progress.total = jobs.get(job_id).n_items
        run.notify()
