"""Start the real SGLang server with a draft, send it prompts, and read how many drafts it accepted.

The server is a process of its own (see sglang.py) and is always ended. Its prompts are token ids, so that what is
served is exactly what `eagle3 evaluate` decoded.
"""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import shlex
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from bridge import check, convert, processes, sglang
from eagle3_jax import defaults
from eagle3_jax.data import chat
from eagle3_jax.decode.drafting import Drafting
from eagle3_jax.decode.evaluate import accept_length, interval
from eagle3_jax.errors import ConfigError, UserError
from eagle3_jax.progress import bar
from eagle3_jax.target import shape as target_shape
from eagle3_jax.target import weights
from eagle3_jax.train import setup

HOST = "127.0.0.1"
POLL = 0.5  # seconds between two looks at whether the server is up
REQUEST = 600.0  # seconds that one answer may take
TOGETHER = {"cpu": 8, "cuda": 16}  # requests at a time


@dataclasses.dataclass(frozen=True)
class Server:
    """What is started; made by `plan`, which checks it."""

    directory: Path
    target: Path
    device: str  # cpu or cuda
    drafting: Drafting
    dtype: str
    context_length: int
    port: int
    python: str
    trace: Path | None = None  # where the CPU's stand-in writes down what it verifies

    def command(self) -> list[str]:
        options = sglang.launch_options(
            self.target, self.directory, self.dtype, self.drafting, self.context_length
        ) | {"port": self.port, "host": HOST, "decode_log_interval": 1, "skip_tokenizer_init": True}
        if self.device == "cpu":
            options |= sglang.CPU_OPTIONS | {
                "disable_radix_cache": True, "max_running_requests": TOGETHER["cpu"],
                "max_total_tokens": TOGETHER["cpu"] * self.context_length,
            }  # fmt: skip
        return [self.python, "-m", "sglang.launch_server", *sglang.flags(options)]

    def variables(self) -> dict[str, str]:
        """What the process needs in its environment beside what is there."""
        told = sglang.CPU_VARIABLES if self.device == "cpu" else {}
        return told if self.trace is None else told | {sglang.TRACE: str(self.trace)}

    def line(self) -> str:
        """The command as a shell reads it."""
        return " ".join(
            [*(f"{k}={shlex.quote(v)}" for k, v in self.variables().items()), shlex.join(self.command())]
        )


def plan(
    directory: str | Path, target: str | Path, device: str, drafting: Drafting, *, dtype: str | None = None,
    context_length: int | None = None, port: int | None = None, python: str | None = None,
) -> Server:  # fmt: skip
    """The server to start. Raises ConfigError for what SGLang would refuse, or accept and then serve badly."""
    directory, target = Path(directory), Path(target)
    config, shape = convert.read_config(directory), target_shape.read(target)
    then = (config.get("provenance") or {}).get("target_weights_digest")
    if then and then != (now := weights.digest(target)):
        raise ConfigError(
            f"{directory}: made for a target with weights {then[:12]}, {target} has {now[:12]}; every proposal would "
            "rest on states that the draft does not know"
        )
    faults = [f for f in check.check(directory, str(target)) if f.severity == "error"]
    if faults:
        raise ConfigError(
            f"{directory}: {faults[0].where}: found {faults[0].found}, wanted {faults[0].wanted} "
            f"({len(faults)} errors in all: bridge check {directory} --target {target})"
        )
    if drafting.topk > config["draft_vocab_size"]:
        raise ConfigError(
            f"topk={drafting.topk} exceeds the draft vocabulary of {config['draft_vocab_size']}"
        )
    most = min(shape.max_position_embeddings, config["max_position_embeddings"])
    if context_length is not None and not 1 <= context_length <= most:
        raise ConfigError(
            f"context length {context_length} must be within 1 .. {most}, what target and draft can do"
        )
    dtype = dtype or ("float32" if device == "cpu" else config["torch_dtype"])
    length = context_length or (min(most, 2048) if device == "cpu" else most)
    return Server(
        directory,
        target,
        device,
        drafting,
        dtype,
        length,
        port or _free_port(),
        python or sglang.python(device),
    )


@contextlib.contextmanager
def running(server: Server, timeout: float) -> Iterator[str]:
    """The server's address once it answers; the server and all that it started is ended on leaving.

    Raises UserError with its last lines where it ends before, or is not up after `timeout` seconds.
    """
    _refuse_taken(server.port)
    url, environment = f"http://{HOST}:{server.port}", sglang.environment(os.environ, server.variables())
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        process = subprocess.Popen(
            server.command(), env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip
        try:
            _wait(process, url, time.monotonic() + timeout)
            yield url
        except (OSError, UserError) as error:
            if isinstance(error, OSError):  # the connection broke: perhaps because the server is just ending
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(5)
            how = f"ended with status {process.poll()}" if process.poll() is not None else str(error)
            raise UserError(f"SGLang {how}; its last lines:\n{processes.last_lines(log)}") from None
        finally:
            processes.end_group(process)


def measure(
    url: str, prompts: Sequence[Sequence[int]], max_new_tokens: int, end_tokens: Sequence[int], together: int,
    trace: Path | None = None,
) -> dict:  # fmt: skip
    """What the server counts on these prompts: per answer, and its own average over them alone.

    Greedy; each answer goes on to an end token or to `max_new_tokens`. With the server's `trace` also `rounds`, all
    that it verified, whichever prompt it was for.
    """
    _call(f"{url}/flush_cache", {})  # its counters begin anew: what warm-up left is not counted
    if trace:
        trace.write_text("")
    sampling = {
        "temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": not end_tokens,
        "stop_token_ids": [*end_tokens],
    }  # fmt: skip
    with (
        bar("serve", len(prompts), "prompts") as progress,
        concurrent.futures.ThreadPoolExecutor(together) as pool,
    ):

        def ask(ids: Sequence[int]) -> dict:
            out = _call(f"{url}/generate", {"input_ids": [*map(int, ids)], "sampling_params": sampling})
            progress.advance(1)
            return out

        answers = list(pool.map(ask, prompts))
    server = _call(f"{url}/server_info")["internal_states"][0].get("avg_spec_accept_length")
    return served(answers, server) | ({"rounds": sglang.read_trace(trace.read_text())} if trace else {})


def served(answers: Sequence[dict], server: float | None) -> dict:
    """Our definitions of the accept length, from each answer's meta_info."""
    # An answer that ends with the prefill's token has no such counters.
    meta = [a["meta_info"] for a in answers if "spec_verify_ct" in a["meta_info"]]
    if not meta:
        raise UserError("did not speculate: no answer has spec_verify_ct")
    pairs = np.zeros((len(answers), 2), int)
    for i, a in enumerate(answers):
        pairs[i] = [a["meta_info"].get(k, 0) for k in ("spec_num_correct_drafts", "spec_verify_ct")]
    accepted, forwards = (int(n) for n in pairs.sum(axis=0))
    tokens = [list(a["output_ids"]) for a in answers]
    return {
        "accept_length": accept_length(pairs),
        "interval": interval(pairs),
        "verify_forwards": forwards,
        "accepted_drafts": accepted,
        "sglang_request": sum(map(len, tokens)) / max(forwards, 1),
        "sglang_server": server,
        "histogram": _histogram([m["spec_correct_drafts_histogram"] for m in meta]),
        "tokens": tokens,
        "pairs": pairs.tolist(),
    }


def predicted(directory: str | Path, drafting: Drafting) -> dict | None:
    """What `eagle3 evaluate` found for this draft with the same drafting, if the export knows it."""
    found = (convert.read_config(directory).get("provenance") or {}).get("predicted")
    return found if found and tuple(found[k] for k in Drafting._fields) == drafting else None


def describe(server: Server, before: dict | None, found: dict, count: int) -> str:
    """Predicted beside served, in a few lines."""
    d = server.drafting
    rows = [("", "predicted", "served")]
    for key, name in (
        ("accept_length", "accept length"), ("sglang_request", "as SGLang counts a request"),
        ("sglang_server", "as SGLang counts the server"),
    ):  # fmt: skip
        # The server's own average is our definition.
        values = ((before or {}).get("accept_length" if key == "sglang_server" else key), found[key])
        rows.append((name, *("-" if x is None else f"{x:.3f}" for x in values)))
    low, high = found["interval"]
    lines = [f"{name:28s} {a:>10s} {b:>10s}" for name, a, b in rows]
    lines.append(
        f"served: {d.kind} {d.name}, {count} prompts, greedy, {server.dtype}, on {server.device}; "
        f"{found['accepted_drafts']:,} accepted in {found['verify_forwards']:,} verifies, 95 % {low:.3f} .. {high:.3f}"
    )
    if before is None:
        lines.append(
            f"predicted: not known for {d.name}; `eagle3 evaluate RUN` with it, then `bridge convert`"
        )
    else:
        lines.append(
            f"predicted: {before['prompts']} prompts, {before['max_new_tokens']} tokens, {before['dtype']}, "
            f"95 % {before['interval'][0]:.3f} .. {before['interval'][1]:.3f}"
        )
    return "\n".join(lines)


def prompts(
    target: Path, source: str | None, most: int | None, room: int
) -> tuple[list[list[int]], tuple[int, ...]]:
    """The prompts that `eagle3 evaluate` takes, as token ids, and the tokens that end an answer."""
    tokenizer = setup.tokenizer(setup.TargetFiles(target, target_shape.read(target)))
    texts = defaults.evaluation_prompts(source)[:most]
    ids = [chat.prompt(tokenizer, (("user", p["prompt"]),)).tolist() for p in texts]
    longest = max(map(len, ids))
    if longest > room:
        raise ConfigError(
            f"a prompt has {longest} tokens, {room} fit beside the answer: raise --context-length"
        )
    return ids, chat.end_tokens(tokenizer)


def _histogram(rows: Sequence[Sequence[int]]) -> list[int]:
    total = np.zeros(max(map(len, rows), default=0), int)
    for row in rows:
        total[: len(row)] += row
    return total.tolist()


def _wait(process: subprocess.Popen, url: str, until: float) -> None:
    """Until the server has finished its warm-up. Raises UserError."""
    while True:
        if process.poll() is not None:
            raise UserError("ended while starting")
        if time.monotonic() > until:
            raise UserError("was not ready in time (--timeout gives it longer)")
        with contextlib.suppress(OSError, UserError):  # not there yet, or says that it is starting
            _call(f"{url}/health", timeout=5)
            return
        time.sleep(POLL)


def _call(url: str, body: dict | None = None, timeout: float = REQUEST):
    """JSON of a GET, or of a POST of `body`; "" where the answer is empty. Raises UserError for a refusal."""
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            text = answer.read().decode()
    except urllib.error.HTTPError as error:
        raise UserError(f"refused {url.rpartition('/')[2]}: {error.read().decode()[:500]}") from None
    try:
        return json.loads(text)
    except ValueError:
        return text


def _free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return s.getsockname()[1]


def _refuse_taken(port: int) -> None:
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            s.bind((HOST, port))
        except OSError as error:
            raise ConfigError(f"port {port}: {error.strerror}; give another --port, or none") from None
