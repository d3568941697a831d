"""The map that `ragserve tune` draws: quality over the time to the first token, the front, and the point that
strategy `auto` takes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

from ragserve.best_passages import choice_of
from ragserve.profiles.gate import LEVEL
from ragserve.strategy_spec import parse

_TEMPLATE = Path(__file__).with_name("tune_map.html")
_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _EDGE = 860, 420, 50, 40, 24
_TICKS = 5
Point = dict[str, Any]


def map_of(result: Mapping[str, Any], earlier: Sequence[Point] = ()) -> dict[str, Any]:
    """The map of a run (`ragserve.verification.calibration.tune_process.tune`): its points, which of them are
    on the front, the chosen one, and why in a sentence. ``earlier`` points of other retrievers stay."""
    full = result["full"]
    points = [_point("full", full, {}, "everything, exact")]
    for one in result["verdicts"]:
        points.append(_point(one["label"], one, one["figures"], one["line"]) | {"decision": one["decision"]})
    for each in points:
        each["retriever"] = result["retriever"]
    points += [each for each in earlier if each["retriever"] != result["retriever"]]
    for each in points:
        each["front"] = each["score"] is not None and not any(_beats(other, each) for other in points)
    own = [each for each in points if each["retriever"] == result["retriever"]]
    verified = [each for each in own if each.get("decision") == "verified"]
    best = max((each["vs_full"] or 0.0 for each in verified), default=0.0)
    verified = [each for each in verified if (each["vs_full"] or 0.0) >= best - LEVEL]
    chosen = min(verified, key=_ms, default=None)
    named = {name: result[name] for name in ("namespace", "model", "retriever", "margin")}
    return named | {
        "probes": full["probes"],
        "points": sorted(points, key=_ms),
        "chosen": chosen and chosen["strategy"],
        "why": _why(own, chosen),
    }


def page(found: Mapping[str, Any]) -> str:
    """The map as a page without scripts and addresses."""
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    drawn = picture(found["points"], found["chosen"])
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(map=found, picture=drawn and Markup(drawn)) + "\n"


def picture(points: Sequence[Point], chosen: str | None) -> str | None:
    """Score over milliseconds, as an SVG element; None without points."""
    known = [each for each in points if each["score"] is not None and each["ttft_ms"] is not None]
    if not known:
        return None
    most = 1.1 * max(each["ttft_ms"] for each in known) or 1.0
    svg = ET.Element("svg", {"viewBox": f"0 0 {_WIDTH} {_HEIGHT}", "role": "img"})
    svg.set("aria-label", "Score in percent over milliseconds to the first token")

    def x(ms: float) -> str:
        return f"{_LEFT + (_WIDTH - _LEFT - _EDGE) * ms / most:.1f}"

    def y(percent: float) -> str:
        return f"{_EDGE + (_HEIGHT - _BOTTOM - _EDGE) * (1 - percent / 100):.1f}"

    def add(name: str, kind: str, text: str = "", **attributes: str) -> ET.Element:
        element = ET.SubElement(svg, name, {"class": kind, **attributes})
        element.text = text or None
        return element

    for step in range(_TICKS + 1):
        percent, ms = 100 * step / _TICKS, most * step / _TICKS
        add("line", "grid", x1=x(0), x2=x(most), y1=y(percent), y2=y(percent))
        add("text", "tick", f"{percent:.0f}", x=str(_LEFT - 20), y=y(percent))
        add("text", "tick", f"{ms:,.0f} ms", x=x(ms), y=str(_HEIGHT - 12))
    front = sorted((each for each in known if each["front"]), key=_ms)
    line = " ".join(f"{x(each['ttft_ms'])},{y(each['score'][0])}" for each in front)
    add("polyline", "front", points=line)
    for each in known:
        at, (score, low, high) = x(each["ttft_ms"]), each["score"]
        add("line", "whisker", x1=at, x2=at, y1=y(low), y2=y(high))
        kind = "exact" if each["exact"] else "stored"
        ring = " chosen" if each["strategy"] == chosen else ""
        dot = add("circle", kind + ring, cx=at, cy=y(score), r="6")
        told = f"{each['strategy']}: {score:.1f} [{low:.1f}, {high:.1f}] at {each['ttft_ms']:,.0f} ms"
        ET.SubElement(dot, "title").text = told
    return ET.tostring(svg, encoding="unicode")


def _point(label: str, one: Mapping[str, Any], figures: Mapping[str, Any], verdict: str) -> Point:
    recomputed = figures.get("recomputed")
    return {
        "strategy": label,
        "exact": parse(label)[0].name in ("full", "passages"),
        "score": one["score"] and list(one["score"]),
        "ttft_ms": one["ttft_ms"],
        "vs_full": figures.get("score_vs_full"),
        "margin": figures.get("margin"),
        "kept": figures.get("kept", 100.0),
        "computed": 100.0 if label == "full" else recomputed,
        "verdict": verdict,
    }


def _beats(one: Point, other: Point) -> bool:
    """Whether a point is sooner and no worse, or better and no later."""
    if one["score"] is None or one is other:
        return False
    gains = one["score"][0] - other["score"][0], _ms(other) - _ms(one)
    return min(gains) >= 0 and max(gains) > 0


def _ms(point: Point) -> float:
    return math.inf if point["ttft_ms"] is None else point["ttft_ms"]


def _why(points: Sequence[Point], chosen: Point | None) -> str:
    front = sorted((each for each in points if each["front"]), key=_ms)
    if chosen is None:
        known = "; ".join(map(_told, front)) or "nothing was compared"
        return f"Nothing is verified yet, so auto stays with prefix: {known}."
    full = [each for each in points if each["strategy"] == "full" and each["score"]]
    others = [each for each in front if each is not chosen and each["strategy"] != "full"][:1]
    told = "; ".join(map(_told, [*others, *full]))
    return f"The best that auto may take is {_told(chosen)}, {chosen['verdict']}. Beside it, {told}."


def _told(point: Point) -> str:
    at = "" if point["ttft_ms"] is None else f" at {point['ttft_ms']:,.0f} ms"
    score, low, high = point["score"] or (0.0, 0.0, 0.0)
    return f"{_named(point['strategy'])}: {score:.0f} ± {(high - low) / 2:.0f}{at}"


def _named(label: str) -> str:
    """A strategy in words, where there are some."""
    spec = parse(label)[0]
    if spec.name == "full":
        return "all passages, exact"
    best, options = choice_of(spec.name, spec.options)
    read = "all passages"
    if best is not None:
        read = (
            f"the best {best.count} passages" if best.count else f"the best {best.share:.0%} of the passages"
        )
    if spec.name == "passages":
        return f"{read}, exact"
    share = options.get("share")
    again = "" if share is None else f", {share:.0%} recomputed"
    return f"{read} from stored KV ({spec.name}{again})"
