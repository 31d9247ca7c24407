"""Lets torchvision load beside the CPU build of torch, in every process that has this directory on PYTHONPATH.

PyPI's torchvision is the CUDA build. Its compiled operators do not load without CUDA, but its Python part adds
to two of them on import and fails where nobody has declared them; SGLang imports torchvision only for
image transforms. Python runs this module at start-up, in the processes that SGLang spawns too.
"""

import contextlib

with contextlib.suppress(ImportError):
    import torch

    # The library has to outlive this module: its declarations go when it is collected.
    torchvision_operators = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        torchvision_operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
