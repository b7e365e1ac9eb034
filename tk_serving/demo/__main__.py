"""``python -m tk_serving.demo``."""

import argparse
import os
import sys

from tk_serving import demo
from tk_serving.demo import engines
from tk_serving.demo.checkpoint import MODELS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tk_serving.demo", description=demo.__doc__)
    parser.add_argument("--engine", choices=engines.NAMES, default="vllm")
    parser.add_argument("--model", choices=tuple(MODELS), default="v3")
    parser.add_argument("--tokens", type=int, default=16, help="tokens to generate for each prompt (default: 16)")
    parser.add_argument("--port", type=int, default=0, help="port on 127.0.0.1 (default: any free one)")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint and the server logs")
    parser.add_argument(
        "--simulate",
        action="store_true",
        default=os.environ.get("SIMULATE") == "1",
        help="run the generated CUDA in the simulator (default: whether SIMULATE=1)",
    )
    return demo.run(**vars(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
