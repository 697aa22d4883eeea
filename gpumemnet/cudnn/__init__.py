"""Workspaces of convolutions from cuDNN itself, without a GPU.

Since version 9.8, cuDNN answers for a described device (NVIDIA, cuDNN documentation, "Deviceless
Ahead-of-Time Compilation"). :class:`~gpumemnet.cudnn.session.CudnnSession` asks it in a child
process: which plans it has for a convolution, in the order in which PyTorch tries them, and the
workspace of each.
"""
