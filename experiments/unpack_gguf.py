"""A `.gguf` file, or its pieces in order, as a folder that transformers loads.

    python experiments/unpack_gguf.py PIECE [PIECE …] --out FOLDER [--dtype bfloat16]

Unpacked in float32, which is exact, into the cache of the library (TENSORLENS_CACHE, on the same disk as FOLDER), and
then rounded to --dtype.
"""

import argparse
import os
import shutil
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tensorlens.models.gguf import convert_gguf


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pieces", nargs="+", type=Path)
    parser.add_argument("--out", required=True, type=Path)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    arguments = parser.parse_args()
    began = time.time()
    folder = convert_gguf(arguments.out.name, arguments.pieces)
    print(f"unpacked in {time.time() - began:.0f} s", flush=True)
    if arguments.dtype == "float32":
        shutil.copytree(folder, arguments.out, copy_function=os.link)  # no second copy of gigabytes
        return
    AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype)).save_pretrained(arguments.out)
    AutoTokenizer.from_pretrained(folder).save_pretrained(arguments.out)
    print(f"{arguments.out}, {time.time() - began:.0f} s")


if __name__ == "__main__":
    main()
