"""Sites are fetched as they allow it, sitemaps are followed, and clients reach no networks of the server."""

from __future__ import annotations

import gzip
import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest
import typer

from ragserve.commands.ingest import ingest
from ragserve.config import load
from ragserve.errors import Forbidden, InvalidRequest, RagserveError, Unavailable
from ragserve.ingest.fetch import Fetcher
from ragserve.ingest.guarded_transport import is_public
from ragserve.ingest.ingestor import Ingestor, PathOptions
from ragserve.ingest.jobs.job_report import JobReport
from ragserve.ingest.sitemap import is_sitemap, sitemap_urls
from ragserve.retrieval.embedder import Embedder
from ragserve_index import IndexStore
from tests.unit.api.scripted_server import WordEmbedder
from tests.unit.ingest.web_site import WebSite, web_site


@pytest.fixture(scope="module")
def _site() -> Iterator[WebSite]:
    with web_site() as site:
        yield site


@pytest.fixture
def site(_site: WebSite) -> WebSite:
    _site.pages.clear()
    _site.types.clear()
    _site.asked.clear()
    return _site


MakeFetcher = Callable[..., Fetcher]


@pytest.fixture
def fetcher() -> Iterator[MakeFetcher]:
    with ExitStack() as stack:
        yield lambda **options: stack.enter_context(Fetcher(max_bytes=100_000, **options))


def test_robots_txt_is_read_once_and_obeyed(site: WebSite, fetcher: MakeFetcher, tmp_path: Path) -> None:
    site.put("/robots.txt", "User-agent: other\nDisallow: /\n\nUser-agent: *\nDisallow: /private/\n")
    site.put("/open.html", "<p>hello</p>")
    site.put("/private/a.html", "<p>secret</p>")
    site.put("/moved", "", status="/private/a.html")
    polite = fetcher()
    assert polite.fetch(site.url("/open.html"), tmp_path).path.read_text() == "<p>hello</p>"
    for path in ("/private/a.html", "/moved"):
        with pytest.raises(Forbidden, match=r"robots\.txt forbids it.*RAGSERVE_ROBOTS=ignore") as caught:
            polite.fetch(site.url(path), tmp_path)
        assert caught.value.code == "robots"
    assert site.asked == ["/robots.txt", "/open.html", "/moved"]
    assert fetcher(robots=False).fetch(site.url("/moved"), tmp_path).url == site.url("/private/a.html")


def test_a_crawl_delay_is_kept_and_a_stop_ends_it(
    site: WebSite, fetcher: MakeFetcher, tmp_path: Path
) -> None:
    site.put("/robots.txt", "User-agent: *\nRequest-rate: 4/1\n")
    site.put("/a.html", "<p>a</p>")
    started = time.monotonic()
    polite = fetcher()
    for _ in range(3):
        polite.fetch(site.url("/a.html"), tmp_path)
    assert time.monotonic() - started >= 0.5

    site.put("/robots.txt", "User-agent: *\nCrawl-delay: 50\n")
    stopped = fetcher(should_stop=lambda: True)
    stopped.fetch(site.url("/a.html"), tmp_path)
    with pytest.raises(Unavailable, match="stopped"):
        stopped.fetch(site.url("/a.html"), tmp_path)

    site.put("/robots.txt", "User-agent: *\nCrawl-delay: 3600\n")
    with pytest.raises(Forbidden, match="asks for 3600 s"):
        fetcher().fetch(site.url("/a.html"), tmp_path)


@pytest.mark.parametrize(
    "line",
    [
        "Request-rate: 0/10",
        "Request-rate: 1/" + "9" * 400,
        "Crawl-delay: \u00b2",
        "Crawl-delay: " + "9" * 400,
        "Crawl-delay: " + "9" * 5000,
        "Disallow: //[x",
        "Sitemap",
        "\0: \0",
    ],
)
def test_a_line_of_robots_txt_that_nobody_can_read_counts_as_none(
    line: str, site: WebSite, fetcher: MakeFetcher, tmp_path: Path
) -> None:
    site.put("/robots.txt", f"User-agent: *\n{line}\nDisallow: /private/\n")
    site.put("/a.html", "<p>a</p>")
    assert fetcher().fetch(site.url("/a.html"), tmp_path).path.read_text() == "<p>a</p>"
    with pytest.raises(Forbidden):
        fetcher().fetch(site.url("/private/a.html"), tmp_path)


def test_without_a_readable_robots_txt_nothing_is_fetched(
    site: WebSite, fetcher: MakeFetcher, tmp_path: Path
) -> None:
    site.put("/robots.txt", "", status=503)
    site.put("/a.html", "<p>a</p>")
    with pytest.raises(Unavailable, match=r"HTTP 503 from .*robots\.txt"):
        fetcher().fetch(site.url("/a.html"), tmp_path)
    assert site.asked == ["/robots.txt"]


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1::1", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1", False),
        ("fd00::1", False),
        ("::ffff:127.0.0.1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_addresses_of_the_internet(address: str, public: bool) -> None:
    assert is_public(ip_address(address)) is public


def test_a_guarded_fetch_reaches_no_other_address_by_name_or_redirect(
    site: WebSite, fetcher: MakeFetcher, tmp_path: Path
) -> None:
    def guarded() -> Fetcher:
        return fetcher(allows=lambda address: str(address) == "127.0.0.1")

    site.put("/a.html", "<p>a</p>")
    site.put("/out", "", status=site.url("/a.html", "127.0.0.2"))
    assert guarded().fetch(site.url("/a.html"), tmp_path).url == site.url("/a.html")
    for url in (site.url("/a.html", "127.0.0.2"), site.url("/out")):
        with pytest.raises(Forbidden, match=r"127\.0\.0\.2 leads to no public address"):
            guarded().fetch(url, tmp_path)


def test_the_log_alone_says_where_a_name_leads(
    site: WebSite, fetcher: MakeFetcher, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(Forbidden, match="localhost leads to no public address") as refused:
        fetcher(allows=is_public).fetch(site.url("/a.html", "localhost"), tmp_path)
    address = socket.getaddrinfo("localhost", 0)[0][4][0]
    assert str(address) not in str(refused.value)
    assert f"localhost is not fetched: it leads to {address}" in caplog.text


def test_a_guarded_fetch_connects_to_the_address_that_it_checked(
    site: WebSite, fetcher: MakeFetcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name server that answers with another address the second time changes nothing."""
    answers = {"rebound.test": ["127.0.0.1", "127.0.0.1", "127.0.0.2", "127.0.0.2"]}
    resolve = socket.getaddrinfo

    def rebinding(host: Any, *rest: Any, **options: Any) -> Any:
        return resolve(answers[host].pop(0) if host in answers else host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", rebinding)
    site.put("/a.html", "<p>a</p>")
    got = fetcher(allows=lambda address: str(address) == "127.0.0.1").fetch(
        site.url("/a.html", "rebound.test"), tmp_path
    )
    assert (got.url, answers["rebound.test"]) == (site.url("/a.html", "rebound.test"), ["127.0.0.2"] * 2)


def test_a_sitemap_gives_the_pages_of_its_host(site: WebSite, fetcher: MakeFetcher) -> None:
    pages = [site.url(f"/{n}.html") for n in range(3)]
    first = site.put_sitemap(
        "/sitemap-1.xml", *pages[:2], site.url("/x.html", "127.0.0.2"), "javascript:alert(1)"
    )
    second = site.put(
        "/sitemap-2.xml.gz", gzip.compress(site.pages["/sitemap-1.xml"][1].replace(b"/0.html", b"/2.html"))
    )
    broken = site.put("/sitemap-3.xml", "<urlset><url>")
    index = site.put_sitemap(
        "/sitemap.xml", first, second, broken, site.url("/s.xml", "127.0.0.2"), index=True
    )
    found = sitemap_urls(fetcher(), index, limit=100)
    assert list(found.urls) == [pages[0], pages[1], pages[2]]
    assert found.elsewhere == 3
    assert "a sitemap: 3 URLs; 3 on other hosts left out (--other-hosts)" in found.summary()
    assert "sitemap-3.xml is no sitemap" in found.summary()
    few = sitemap_urls(fetcher(), index, limit=1)
    assert (list(few.urls), "more left out (RAGSERVE_SITEMAP_URLS)" in few.summary()) == (pages[:1], True)
    every = sitemap_urls(fetcher(), index, limit=100, other_hosts=True)
    assert site.url("/x.html", "127.0.0.2") in every.urls
    with pytest.raises(RagserveError, match="is no sitemap"):
        sitemap_urls(fetcher(), broken, limit=1)


def test_a_sitemap_that_unpacks_to_gigabytes_is_refused(site: WebSite, fetcher: MakeFetcher) -> None:
    bomb = site.put("/sitemap.xml.gz", gzip.compress(bytes(60 * 2**20), 1))
    with pytest.raises(RagserveError, match="unpacks to more"):
        sitemap_urls(fetcher(), bomb, limit=1)


@pytest.mark.parametrize(
    "inner",
    ["<a/>", "<url><a/></url>", "<url><loc>javascript:0</loc></url>", "<url/>text<sitemap/>"],
    ids=["foreign", "nested", "loc", "text"],
)
def test_a_sitemap_costs_no_more_memory_than_its_bytes(
    inner: str, site: WebSite, fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragserve.ingest.sitemap._MOST_ELEMENTS", 20_000)
    big = f"<urlset>{inner * 200_000}</urlset>"
    with pytest.raises(RagserveError, match="has more than 20,000 elements"):
        sitemap_urls(fetcher(), site.put("/sitemap.xml.gz", gzip.compress(big.encode(), 1)), limit=10)
    # its whole tree is never there: what lxml has built is freed before the next entry
    target = site.url("/a.html")
    site.put("/sitemap.xml", f"<urlset>{inner * 2000}<url><loc>{target}</loc></url></urlset>")
    assert list(sitemap_urls(fetcher(), site.url("/sitemap.xml"), limit=10).urls) == [target]


def test_entries_are_found_as_the_protocol_says(site: WebSite, fetcher: MakeFetcher) -> None:
    space = 'xmlns="http://www.sitemaps.org/schemas/sitemap/0.9" xmlns:image="http://example.org/image"'
    picture = f"<image:image><image:loc>{site.url('/a.png')}</image:loc></image:image>"
    body = (
        f"<urlset {space}><url>{picture}<loc>\n {site.url('/a?x=1')}&amp;y=<![CDATA[2]]>\n</loc></url>"
        f"<url><loc>http://[x</loc></url><url><loc>{site.url('/' + 'long' * 1000)}</loc></url></urlset>"
    )
    found = sitemap_urls(fetcher(), site.put("/sitemap.xml", body), limit=10)
    assert list(found.urls) == [site.url("/a?x=1&y=2")]


def test_the_sitemaps_of_an_index_are_limited(
    site: WebSite, fetcher: MakeFetcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ragserve.ingest.sitemap._MOST_SITEMAPS", 3)
    site.put_sitemap("/s/1.xml", site.url("/a.html"))
    index = site.put_sitemap("/sitemap.xml", *(site.url(f"/s/{n}.xml") for n in range(1, 9)), index=True)
    found = sitemap_urls(fetcher(), index, limit=10)
    assert (list(found.urls), len(found.read)) == ([site.url("/a.html")], 3)
    assert "6 sitemaps not read" in found.summary()


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("https://example.com/sitemap.xml", True),
        ("https://example.com/de/Sitemap_index-2.xml.gz", True),
        ("https://example.com/feed.xml", False),
        ("https://example.com/sitemap.html", False),
        ("/srv/sitemap.xml", False),
    ],
)
def test_sitemaps_are_known_by_name(url: str, named: bool) -> None:
    assert is_sitemap(url) is named


@pytest.fixture
def crawler(tmp_path: Path, store: IndexStore) -> Ingestor:
    return Ingestor(load(data_dir=tmp_path / "data", url_ingestion="any"), store, WordEmbedder())


def outcomes(ingestor: Ingestor, report: JobReport) -> dict[str, tuple[str, str | None]]:
    items = ingestor.jobs.items(report.job_id)
    return {item.source.rpartition("/")[2]: (item.state, item.reason) for item in items}


def test_a_site_is_ingested_by_its_sitemap(site: WebSite, crawler: Ingestor, store: IndexStore) -> None:
    pages = [site.put(f"/{name}", f"<h1>{name}</h1>") for name in ("a.html", "b.html", "secret.html")]
    robots = (
        f"Sitemap: {site.put_sitemap('/all.xml', site.url('/'), *pages)}\nUser-agent: *\nDisallow: /secret"
    )
    site.put("/robots.txt", robots)
    home = site.put("/", "<p>Welcome.</p>")
    job = crawler.submit_paths("web", [home], PathOptions(sitemap=True))
    report = crawler.run(job.job_id)
    assert report.state == "done"
    states = outcomes(crawler, report)
    assert {name: state for name, (state, _) in states.items()} == {
        "": "indexed",
        "all.xml": "skipped",
        "a.html": "indexed",
        "b.html": "indexed",
        "secret.html": "failed",
    }
    assert states["all.xml"][1] == "a sitemap: 4 URLs"
    assert "robots.txt forbids it" in (states["secret.html"][1] or "")
    assert report.progress.total == 5
    assert {document.source for document in store.documents("web")} == {home, *pages[:2]}


@pytest.mark.parametrize(
    ("body", "wrong", "right", "text"),
    [
        (
            "стоимость билета".encode("koi8-r"),
            "text/plain; charset=iso-8859-1",
            "text/plain; charset=koi8-r",
            "стоимость билета",
        ),
        (b"part,price\nKX-1,20\n", "text/plain", "text/csv", "| KX-1 | 20 |"),
    ],
    ids=["charset", "type"],
)
def test_a_page_that_is_declared_anew_is_read_anew(
    site: WebSite, crawler: Ingestor, store: IndexStore, body: bytes, wrong: str, right: str, text: str
) -> None:
    url = site.put("/a", body)
    read = []
    for declared in (wrong, right, right):
        site.types["/a"] = declared
        report = crawler.run(crawler.submit_paths("web", [url]).job_id)
        [document] = store.documents("web")
        shown = "".join(chunk.text for chunk in store.document_chunks("web", document.doc_id))
        read.append((report.progress.indexed, report.progress.unchanged, text in shown))
    assert read == [(1, 0, False), (1, 0, True), (0, 1, True)]


def test_a_source_whose_fetch_breaks_fails_alone(
    site: WebSite, crawler: Ingestor, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Fetcher.read

    def read(self: Fetcher, url: str, max_bytes: int) -> bytes:
        if "broken" in url:
            raise IndexError("a library did not expect this")
        return real(self, url, max_bytes)

    def fetch(self: Fetcher, url: str, folder: Path) -> Any:
        raise IndexError("nor this \udcff")

    good = site.put_sitemap("/sitemap.xml", site.url("/a.html"))
    monkeypatch.setattr(Fetcher, "read", read)
    monkeypatch.setattr(Fetcher, "fetch", fetch)
    urls = [site.url("/broken/sitemap.xml"), good]
    report = crawler.run(crawler.submit_urls("web", urls, PathOptions()).job_id)
    assert report.state == "done"
    assert [reason for _, reason in report.failures] == [
        "a library did not expect this",
        "could not be fetched: IndexError: nor this \ufffd",
    ]


def test_the_command_follows_a_sitemap(
    site: WebSite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Embedder, "of", lambda settings: WordEmbedder())
    site.put("/robots.txt", "User-agent: *\nDisallow: /")
    elsewhere = site.url("/b.html", "localhost")
    site.put_sitemap("/sitemap.xml", site.put("/a.html", "<h1>Whales</h1>"), elsewhere)
    site.put("/b.html", "<h1>Otters</h1>")
    settings = load(data_dir=tmp_path / "data", robots="ignore")
    with pytest.raises(typer.Exit):
        ingest(settings, [site.url("/")], sitemap=True, other_hosts=True, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert (report["files"]["indexed"], report["failures"]) == (2, [])
    assert report["skipped"] == [{"source": site.url("/"), "reason": "a sitemap: 2 URLs"}]


def test_clients_have_urls_fetched_by_the_same_rules(
    site: WebSite, crawler: Ingestor, store: IndexStore
) -> None:
    page = site.put("/a.html", "<h1>Whales</h1>")
    urls = [site.put_sitemap("/sitemap.xml", page), site.url("/missing.html")]
    report = crawler.run(crawler.submit_urls("web", urls, PathOptions(metadata={"lang": "en"})).job_id)
    assert outcomes(crawler, report) == {
        "sitemap.xml": ("skipped", "a sitemap: 1 URLs"),
        "a.html": ("indexed", None),
        "missing.html": ("failed", f"HTTP 404 Not Found from {urls[1]}"),
    }
    document = store.find_source("web", page)
    assert document is not None
    assert (document.metadata["url"], document.metadata["lang"]) == (page, "en")


def test_clients_reach_only_public_addresses_by_default(
    site: WebSite, tmp_path: Path, store: IndexStore
) -> None:
    settings = load(data_dir=tmp_path / "data")
    ingestor = Ingestor(settings, store, WordEmbedder())
    page = site.put("/a.html", "<p>internal</p>")
    report = ingestor.run(ingestor.submit_urls("web", [page, site.url("/sitemap.xml")], PathOptions()).job_id)
    assert {state for state, _ in outcomes(ingestor, report).values()} == {"failed"}
    assert all("no public address" in (why or "") for _, why in outcomes(ingestor, report).values())
    assert site.asked == []


@pytest.mark.parametrize("url", ["file:///etc/passwd", "/etc/passwd", "ftp://x/y", "https://" + "x" * 3000])
def test_clients_give_urls_of_the_web(url: str, crawler: Ingestor) -> None:
    with pytest.raises(InvalidRequest, match="not an http or https URL"):
        crawler.submit_urls("web", [url], PathOptions())


def test_a_server_may_fetch_nothing(tmp_path: Path, store: IndexStore) -> None:
    ingestor = Ingestor(load(data_dir=tmp_path / "data", url_ingestion="off"), store, WordEmbedder())
    with pytest.raises(Forbidden, match="fetches no URLs"):
        ingestor.submit_urls("web", ["https://example.com/"], PathOptions())
