// The map of a namespace: strategies measured on questions about its own documents, quality over first token.

import { byId, count, element, ms } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT, LEFT, BOTTOM, EDGE] = [600, 260, 48, 36, 16];
const COLUMNS = ["", "Strategy", "Score", "Against full", "Loss excluded beyond", "First token", "Kept", "Recomputed", "Questions", ""];
const number = (value, unit = "") => value === null || value === undefined ? "" : `${value.toFixed(1)}${unit}`;
const signed = (value) => value === null ? "" : `${value > 0 ? "+" : ""}${value.toFixed(1)}`;

export function show(namespace, verification) {
  const own = verification.measured.filter((one) => one.namespace === namespace);
  const out = new Set(verification.in_use.filter((one) => one.namespace === namespace && one.taken_out).map((one) => one.strategy));
  byId("measured-said").textContent = said(namespace, own, verification.idle_tuning);
  byId("map").replaceChildren();
  if (!own.length) return;
  const standing = (one) => out.has(one.strategy) ? "taken out: differs in use" : one.verified ? "verified" : "not verified";
  const points = [...own.map((one) => ({ ...one, said: standing(one) })), full(own)];
  points.sort((a, b) => (a.ttft_ms ?? Infinity) - (b.ttft_ms ?? Infinity));
  points.forEach((one, place) => { one.number = place + 1; });
  draw(points.filter((one) => one.ttft_ms !== null && one.score !== null));
  tabulate(points);
}

function said(namespace, own, tuning) {
  const idle = tuning.namespace === namespace
    ? `The idle server is verifying: ${count(tuning.compared)} questions compared, at most ${count(Math.ceil(tuning.seconds_left / 60))} minutes left.`
    : "";
  if (own.length) return `Measured on questions about these documents; composed answers (auto) use what is verified. ${idle}`;
  const itself = tuning.state === "off" ? "" : ", or wait: an idle server does it by itself";
  return `Nothing is measured on these documents yet. ${idle || `Run ragserve tune --namespace ${namespace}${itself}.`}`;
}

// Full prefill, which all are measured against: what they say of it.
function full(own) {
  const one = own.find((each) => each.full_ttft_ms !== null && each.score !== null) ?? own[0];
  const score = one.score === null ? null : one.score - (one.score_vs_full ?? 0);
  const whole = { strategy: "full", kept: 100, recomputed: 100, score_vs_full: null, margin: null, said: "exact" };
  return { ...whole, score, ttft_ms: one.full_ttft_ms, questions: one.questions };
}

function tabulate(points) {
  const table = element("table", undefined, byId("map"));
  const head = element("tr", undefined, element("thead", undefined, table));
  for (const name of COLUMNS) element(name ? "th" : "td", name, head, name ? { scope: "col" } : {});
  const body = element("tbody", undefined, table);
  for (const one of points) {
    const row = element("tr", undefined, body);
    element("td", `${one.number}`, row);
    element("th", one.strategy, row, { scope: "row" });
    const time = one.ttft_ms === null ? "" : ms(one.ttft_ms);
    for (const value of [number(one.score), signed(one.score_vs_full), number(one.margin), time, number(one.kept, " %"),
      number(one.recomputed, " %"), count(one.questions), one.said]) element("td", value, row);
  }
}

function draw(points) {
  if (points.length < 2) return;
  const svg = document.createElementNS(SVG, "svg");
  const add = (name, attributes, text) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    svg.append(made);
  };
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("role", "img");
  svg.setAttribute("aria-label", "Score over time to the first token, as in the table below");
  const most = 1.1 * Math.max(...points.map((one) => one.ttft_ms)) || 1;
  const x = (value) => LEFT + (WIDTH - LEFT - EDGE) * value / most;
  const y = (percent) => EDGE + (HEIGHT - BOTTOM - EDGE) * (1 - percent / 100);
  for (const percent of [0, 25, 50, 75, 100]) {
    add("line", { class: "grid", x1: x(0), x2: x(most), y1: y(percent), y2: y(percent) });
    add("text", { x: LEFT - 8, y: y(percent) + 4, "text-anchor": "end" }, `${percent}`);
  }
  for (const share of [0, 0.5, 1]) {
    add("text", { x: x(share * most), y: HEIGHT - 12, "text-anchor": ["start", "middle", "end"][2 * share] }, ms(share * most));
  }
  for (const one of points) {
    add("circle", { class: one.said === "verified" ? "taken" : "left", cx: x(one.ttft_ms), cy: y(one.score), r: 6 });
    add("text", { x: x(one.ttft_ms) + 9, y: y(one.score) - 6 }, `${one.number}`);
  }
  byId("map").append(svg);
}
