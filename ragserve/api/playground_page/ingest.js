// Uploads files and follows their jobs.

import { call, get } from "./api.js";
import { byId, count, counted, element } from "./dom.js";

const POLL_MS = 400;
const AWAY_MS = 3000; // between looks at a server that cannot be reached
const UNFINISHED = ["queued", "running"];
const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
let ended = async () => {}; // told the namespace of a job that has ended

// ``limits`` gives the server's. ``ingested`` is told the namespace of each job that has ended.
export function setUp(namespace, limits, ingested) {
  ended = ingested;
  const drop = byId("drop");
  const files = byId("files");
  files.addEventListener("change", () => add([...files.files]));
  for (const event of ["dragover", "dragleave", "drop"]) {
    // beside the field, too: the browser would leave the page and show the file
    document.addEventListener(event, (happened) => {
      happened.preventDefault();
      const inside = drop.contains(happened.target);
      drop.classList.toggle("over", event === "dragover" && inside);
      if (event !== "drop" || !inside) return;
      const items = [...happened.dataTransfer.items].filter((item) => item.kind === "file");
      if (items.some((item) => item.webkitGetAsEntry()?.isDirectory)) {
        fail(box().line, "A folder cannot be dropped: choose its files, or use ragserve ingest FOLDER --recursive.");
      } else add([...happened.dataTransfer.files]);
    });
  }

  async function add(chosen) {
    files.value = "";
    if (!chosen.length) return;
    const shown = box(`Sending ${counted(chosen.length, "file")}`);
    const { max_upload_files: most, max_upload_bytes: largest } = limits();
    const big = chosen.find((file) => file.size > largest);
    if (chosen.length > most) {
      return fail(shown.line, `At most ${counted(most, "file")} can be sent at once, and these are ${count(chosen.length)}. Use ragserve ingest.`);
    }
    if (big) return fail(shown.line, `${big.name} is larger than the ${count(largest)} bytes that the server takes. See max_upload_bytes.`);
    const form = new FormData();
    form.set("namespace", namespace());
    for (const file of chosen) form.append("files", file);
    try {
      await follow(await (await call("/rag/ingest", { method: "POST", body: form })).json(), shown);
    } catch (error) {
      const lost = error.status === 0 && await unreadable(chosen);
      fail(shown.line, lost ? `${lost.name} cannot be read: it was changed or removed. Choose it again.` : error.message);
    }
  }
}

// The first file that the browser cannot read any more; undefined if it can read all.
async function unreadable(files) {
  for (const file of files) {
    try {
      await file.slice(0, 1).arrayBuffer();
    } catch {
      return file;
    }
  }
  return undefined;
}

// Follows the jobs that an earlier visit, or somebody else, has begun.
export async function followUnfinished() {
  for (const state of UNFINISHED) {
    const { jobs } = await get(`/rag/jobs?state=${state}&limit=10`);
    for (const job of jobs.filter((one) => one.kind !== "warm" && !byId(`job-${one.job_id}`))) {
      const shown = box(`${job.namespace}: ${job.state}`);
      follow(job, shown).catch((error) => fail(shown.line, error.message));
    }
  }
}

function box(text) {
  const made = element("div", undefined, undefined, { className: "job" });
  byId("jobs").prepend(made);
  return { made, line: element("div", text, made, { role: "status" }) };
}

function fail(line, why) {
  line.textContent = why;
  line.className = "error";
  line.parentElement.querySelector("progress")?.remove();
}

async function follow(begun, { made, line }) {
  let job = begun;
  made.id = `job-${job.job_id}`;
  const progress = element("progress", undefined, made, { ariaLabel: "Progress of the ingestion" });
  const list = element("ul", undefined, made, { tabIndex: 0, role: "list", ariaLabel: "Files" });
  while (UNFINISHED.includes(job.state)) {
    await pause(line.className ? AWAY_MS : POLL_MS);
    try {
      job = await get(`/rag/jobs/${encodeURIComponent(job.job_id)}?limit=1000`);
      line.className = "";
      show(job, line, progress, list);
    } catch (error) {
      if (error.status !== 0 && error.status !== 503) throw error;
      line.textContent = `${error.message} Trying again.`; // the job goes on once the server does
      line.className = "error";
    }
  }
  await ended(job.namespace);
}

function show(job, line, progress, list) {
  progress.max = job.n_items;
  progress.value = job.n_items - (job.counts.pending ?? 0);
  const failed = job.counts.failed ? `, ${count(job.counts.failed)} failed` : "";
  line.textContent = `${job.namespace}: ${job.state}, ${count(progress.value)} of ${counted(job.n_items, "file")}${failed}, ` +
    `${counted(job.chunks, "passage")}${job.error ? `. ${job.error}` : ""}`;
  const items = [...job.items].sort((a, b) => (b.state === "failed") - (a.state === "failed"));
  list.replaceChildren(...items.map((item) => element(
    "li",
    `${item.source}: ${item.state}${item.reason ? `. ${item.reason}` : ""}`,
    undefined,
    { className: item.state === "failed" ? "error" : "" },
  )));
}
