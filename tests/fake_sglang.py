"""Stands where SGLang's interpreter is expected: `fake_sglang.py -m sglang.launch_server --port N ...`.

FAKE_SGLANG says how it behaves: "ok", "dies" while starting, "hangs" and is never ready, "breaks" at a prompt. It
starts a child that would outlive it and writes both process ids to FAKE_SGLANG_PIDS.
"""

import json
import os
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

HOW = os.environ["FAKE_SGLANG"]
COUNTS = {"correct": 7, "verify": 5}  # what its warm-up left


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/health":
            self.say(200, "")
        elif self.path == "/server_info":
            average = 1 + COUNTS["correct"] / COUNTS["verify"] if COUNTS["verify"] else None
            self.say(200, json.dumps({"internal_states": [{"avg_spec_accept_length": average}]}))

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/flush_cache":
            COUNTS.update(correct=0, verify=0)
            self.say(200, "flushed")
        elif HOW == "breaks":
            print("out of cache", flush=True)
            os._exit(3)
        else:
            # As many drafts accepted in each of two verifications as the prompt has tokens.
            n, limit = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
            COUNTS["correct"] += 2 * n
            COUNTS["verify"] += 2
            meta = dict(
                spec_num_correct_drafts=2 * n, spec_verify_ct=2, spec_correct_drafts_histogram=[0] * n + [2]
            )
            self.say(200, json.dumps({"output_ids": list(range(limit)), "meta_info": meta}))

    def say(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_):
        pass


child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"])
Path(os.environ["FAKE_SGLANG_PIDS"]).write_text(f"{os.getpid()} {child.pid}")
print("loading", flush=True)
if HOW == "dies":
    print("mat1 and mat2 shapes cannot be multiplied", flush=True)
    raise SystemExit(1)
if HOW == "hangs":
    time.sleep(120)
ThreadingHTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
