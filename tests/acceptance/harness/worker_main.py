"""The worker process, which owns the leased devices. In: JSON requests, one a line.
Out: JSON answers, one a line.

A request is {"function": "module:name", "kwargs": {...}}; an answer is {"ok": true, "result": ...} or
{"ok": false, "error": "traceback"}. They use pipes of their own, so that what libraries print cannot mix in.
"""

import gc
import importlib
import json
import os
import sys
import traceback
from typing import Any

from harness import stacks


def main() -> None:
    requests, answers = (int(argument) for argument in sys.argv[1:3])
    stacks.offer("worker")
    with os.fdopen(requests) as source, os.fdopen(answers, "w") as sink:
        for line in source:
            sink.write(json.dumps(_answer(json.loads(line))) + "\n")
            sink.flush()


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    module, _, name = request["function"].partition(":")
    try:
        result = getattr(importlib.import_module(module), name)(**request["kwargs"])
        json.dumps(result)
    # A process boundary: any error of the workload becomes a failure of the check, with its traceback.
    except Exception:  # noqa: BLE001
        return {"ok": False, "error": traceback.format_exc()}
    finally:
        gc.collect()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return {"ok": True, "result": result}


if __name__ == "__main__":
    main()
