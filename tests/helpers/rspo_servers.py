"""Servers for tests: a stand-in that speaks the protocols of several servers, with a real policy behind it, and
transformers' own server in a process of its own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rspo.config import PolicyConfig, RolloutConfig
from rspo.engines import TransformersEngine
from rspo.models.policy import Policy

MODEL = "tiny"
KEY = "a key"


class QuietServer(ThreadingHTTPServer):
    """Says nothing on standard error, which is the test's; keeps its errors but for clients that went away."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.errors: list[BaseException] = []

    def handle_error(self, request: Any, client_address: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.errors.append(error)


class StandIn:
    """An HTTP server in a thread that answers as `speaks` does, from the policy that it holds.

    speaks: "vllm", "llama.cpp", "sglang" or "chat".
    policy: generates; replaced when weights are pushed.
    answers: while this is not set, completions get no answer.
    refusals: statuses of the next answers to completions, before it answers; `refusal` is their body.
    needs_key: only requests with `KEY` are answered.
    """

    def __init__(self, policy: Policy, speaks: str = "vllm") -> None:
        self.policy = policy
        self.speaks = speaks
        self.refusals: list[int] = []
        self.refusal: dict[str, Any] = {"error": {"message": "refused"}}
        self.needs_key = False
        self.answers = threading.Event()
        self.answers.set()
        self.logp_offset = 0.0
        self.asked: list[dict[str, Any]] = []
        self.posted: list[tuple[str, dict[str, Any]]] = []
        self.most_at_once = 0
        self._now = 0
        self._lock = threading.Lock()
        self._http = QuietServer(("127.0.0.1", 0), self._handler())
        self._http.daemon_threads = True
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    def close(self) -> None:
        self.answers.set()
        self._http.shutdown()
        self._http.server_close()
        assert not self._http.errors

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer(*stand_in.get(self.path, self.headers))

            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                data = self.rfile.read(size)
                if len(data) == size:  # the client is still there
                    self.answer(*stand_in.post(self.path, json.loads(data)))

            def answer(self, status: int, values: Any) -> None:
                data = b"" if values is None else json.dumps(values).encode()
                self.send_response(status)
                if data:
                    self.send_header("content-type", "application/json")
                self.send_header("content-length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        return Handler

    def get(self, path: str, headers: Any) -> tuple[int, Any]:
        if self.needs_key and headers["authorization"] != f"Bearer {KEY}":
            return 401, {"error": {"message": "wrong key"}}
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "test"}]}
        return 404, {"error": "not found"}

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path in ("/v1/completions", "/v1/chat/completions"):
            with self._lock:
                self._now += 1
                self.most_at_once = max(self.most_at_once, self._now)
                self.asked.append(body)
                refused = self.refusals.pop(0) if self.refusals else None
            try:
                if refused:
                    return refused, self.refusal
                self.answers.wait()
                return 200, self._complete(body)
            finally:
                with self._lock:
                    self._now -= 1
        self.posted.append((path, body))
        if self.speaks == "vllm" and path == "/collective_rpc" and body["method"] == "reload_weights":
            self._load(body["kwargs"]["weights_path"])
            return 200, {"results": [None]}
        if self.speaks == "vllm" and path == "/reset_prefix_cache":
            return 200, None
        if self.speaks == "sglang" and path == "/update_weights_from_disk":
            self._load(body["model_path"])
            return 200, {"success": True, "message": "done"}
        return 404, {"error": "not found"}

    def _load(self, path: str) -> None:
        self.policy = Policy.load(path, PolicyConfig())

    def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        if "messages" in body:
            (prompt,) = self.policy.encode([body["messages"][0]["content"]])
        else:
            prompt = np.array(body["prompt"], dtype=np.int64)
        config = RolloutConfig(max_prompt_tokens=4096, max_response_tokens=body["max_tokens"])
        generator = torch.Generator().manual_seed(body["seed"])
        with self._lock:
            engine = TransformersEngine(self.policy, config, generator, body["temperature"])
            (generation,) = engine.generate([prompt])
        ids, logp = generation.response_ids.tolist(), (generation.logp + self.logp_offset).tolist()
        ended = ids[-1] in self.policy.eos_token_ids
        choice: dict[str, Any] = {"index": 0, "finish_reason": "stop" if ended else "length", "logprobs": None}
        if self.speaks == "chat":
            choice["message"] = {"role": "assistant", "content": generation.text}
        else:
            choice["text"] = generation.text
        if self.speaks == "vllm":
            choice["token_ids"] = ids
            choice["logprobs"] = {"token_logprobs": logp, "tokens": [""] * len(ids)}
        if self.speaks == "llama.cpp":
            drawn = zip(ids, logp, strict=True)
            choice["logprobs"] = {"content": [{"id": token, "token": "", "logprob": value} for token, value in drawn]}
        usage = {"completion_tokens": len(ids), "prompt_tokens": len(prompt), "total_tokens": len(ids) + len(prompt)}
        return {
            "id": "1",
            "object": "text_completion",
            "created": 0,
            "model": MODEL,
            "choices": [choice],
            "usage": usage,
        }


class TransformersServe:
    """`transformers serve` on a model folder."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.log = log
        self.url = f"http://127.0.0.1:{port}/v1"
        script = Path(sys.executable).with_name("transformers")
        with open(log, "wb") as file:
            self.process = subprocess.Popen(
                [str(script), "serve", str(folder), "--host", "127.0.0.1", "--port", str(port), "--device", "cpu"],
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
            )

    def wait(self, seconds: float = 180.0) -> None:
        """Until it answers."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert self.process.poll() is None, self.log.read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/models", timeout=5):
                    return
            except OSError:
                time.sleep(0.2)
        raise AssertionError(f"transformers serve has not started in {seconds} s:\n{self.log.read_text()}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


@contextmanager
def transformers_serve(folder: Path, log: Path) -> Iterator[TransformersServe]:
    server = TransformersServe(folder, log)
    try:
        server.wait()
        yield server
    finally:
        server.kill()
