"""Fashion-MNIST in two halves, classes 0 to 4 and 5 to 9, as folders that --data fashion_mnist:PATH reads.

    python experiments/057-finetuning-images/classes.py     writes runs/fashion/0-4 and runs/fashion/5-9
"""

import gzip
from pathlib import Path

import numpy as np

PACKAGED = Path("/usr/share/datasets/fashion-mnist")  # of Debian's package dataset-fashion-mnist
FOLDER = Path(__file__).resolve().parents[2] / "runs" / "fashion"


def halve(part):
    """Write the images and labels of "train" or "t10k", in their order, to the two folders."""
    images, labels = f"{part}-images-idx3-ubyte.gz", f"{part}-labels-idx1-ubyte.gz"
    head = gzip.decompress((PACKAGED / images).read_bytes())
    pixels = np.frombuffer(head, np.uint8, offset=16).reshape(-1, 28 * 28)
    classes = np.frombuffer(gzip.decompress((PACKAGED / labels).read_bytes()), np.uint8, offset=8)
    for low in (0, 5):
        kept = (classes >= low) & (classes < low + 5)
        count = int(kept.sum()).to_bytes(4, "big")
        folder = FOLDER / f"{low}-{low + 4}"
        folder.mkdir(parents=True, exist_ok=True)
        content = bytes([0, 0, 8, 3]) + count + head[8:16] + pixels[kept].tobytes()
        (folder / images).write_bytes(gzip.compress(content, mtime=0))
        content = bytes([0, 0, 8, 1]) + count + classes[kept].tobytes()
        (folder / labels).write_bytes(gzip.compress(content, mtime=0))


if __name__ == "__main__":
    for part in ("train", "t10k"):
        halve(part)
