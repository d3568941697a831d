"""Ingest, serve another model, ask, and kill the server. test_wheel runs this in a network namespace that has
only a loopback interface.
"""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
import time
from pathlib import Path

import psutil

SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1


def loopback_up() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        fcntl.ioctl(s, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))


def must_be_cut_off() -> None:
    try:
        socket.create_connection(("192.0.2.1", 80), timeout=1).close()
    except OSError:
        return
    raise SystemExit("this process can reach a network: the test would prove nothing")


def main(work: Path, model: str) -> None:
    from ragserve.engine.running_server import running_server
    from sglang_ext.wire.protocol import PLAN_FIELD, ContextPlan, Span

    loopback_up()
    must_be_cut_off()
    upload = [("files", ("a.txt", "The lighthouse of Orrin was built in 1871 by Mara Tell."))]
    with running_server(data_dir=work / "data", model=model) as server, server.client() as client:
        job = client.post("/rag/ingest", files=upload, data={"namespace": "n"}).headers["location"]
        while (state := client.get(job).json()["state"]) not in ("done", "failed"):
            time.sleep(0.05)
        question = {"query": "Who built the lighthouse?", "namespace": "n", "max_new_tokens": 8}
        answer = client.post("/rag/query", json=question)
        found = client.post("/rag/retrieve", json={"query": question["query"], "namespace": "n"})
        full = client.post("/rag/query", json=question | {"strategy": "full"})
        composed = client.post("/rag/query", json=question | {"strategy": "concat"})
        plan = ContextPlan("compose", "n", "concat", (Span(0, 2),)).to_json()
        sampling = {"max_new_tokens": 2, "custom_params": {PLAN_FIELD: plan}}
        raw = client.post("/generate", json={"input_ids": [5, 6, 7], "sampling_params": sampling})
        info = client.get("/info").json()
        engine = psutil.Process(server.process.pid).children(recursive=True)
        maps = [Path(f"/proc/{each.pid}/maps").read_text() for each in engine]
        memory, said = server.resident_bytes(), server.log.read_text()
        server.process.kill()
        _, left = psutil.wait_procs(engine, timeout=120)
    out = {
        "ingested": state,
        "status": answer.status_code,
        "answer": answer.json(),
        "found": found.json(),
        "info": info,
    }
    out |= {"processes": len(engine), "left": len(left), "resident_bytes": memory}
    out |= {"with_torch": sum("libtorch_cpu" in each for each in maps)}
    out |= {"with_sklearn": sum("/sklearn/" in each for each in maps), "log": said}
    out |= {"full": full.json(), "composed": {"status": composed.status_code, "text": composed.text}}
    print(json.dumps(out | {"raw": {"status": raw.status_code, "text": raw.text}}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
