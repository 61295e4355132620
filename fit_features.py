"""Make digits_features.safetensors: the small classifier in whose features generated digits are scored.

    python fit_features.py      fits on the training digits, prints the held-out accuracy, writes the file (10 seconds)

Run once: the weights are committed, so that every figure is measured with the same yardstick. The held-out digits are
only scored. On one machine the file comes out the same each time; another CPU may round differently.
"""
import torch

import data
import metrics

SEED = 0


def main() -> None:
    torch.set_num_threads(1)  # the order of the sums in backward depends on the number of threads
    digits = data.load(None, "rflow")
    images, labels = digits.train[list(range(len(digits.train)))]
    heldout_images, heldout_labels = digits.heldout[list(range(len(digits.heldout)))]
    net = metrics.fit_feature_net(images, labels, digits.num_classes, SEED)
    accuracy = (net(heldout_images).argmax(1) == heldout_labels).double().mean().item()
    metrics.save_feature_net(net, metrics.DIGITS_FILE, data=digits.name, seed=SEED, heldout_accuracy=accuracy,
                             command="python fit_features.py")
    print(f"{metrics.DIGITS_FILE.name}: {sum(p.numel() for p in net.parameters()):,} parameters, "
          f"held-out accuracy {accuracy:.4f} ({len(heldout_labels)} digits)")


if __name__ == "__main__":
    main()
