"""Which of PyTorch's samples of operators may be refused, or differ, and what the text then says."""

from __future__ import annotations

_OF_A_VALUE = "depends on a value inside a tensor"
_SPECTRA = ("fft", "fft2", "fftn", "ifft", "ifft2", "ifftn", "rfft", "rfft2", "rfftn")
# What comes of real numbers in the end is exported, and refused in training, or where it is inexact.
_OVER_SPECTRA = ("hfft", "hfft2", "hfftn", "ihfft", "ihfft2", "ihfftn", "irfft", "irfft2", "irfftn")
_COMPLEX = ("view_as_complex", "complex", "polar", "stft", "cdouble", "cfloat")
_CONSTANTS = ("zeros_like", "ones_like", "full_like", "new_zeros", "new_ones", "new_full")

# On every engine, and in exports.
EVERYWHERE: dict[str, tuple[str, ...]] = {
    "sets torch's random state": (
        "item",
        "nn.functional.fractional_max_pool2d",
        "nn.functional.fractional_max_pool3d",
        "nn.functional.multi_head_attention_forward",
        "nn.functional.scaled_dot_product_attention",
    ),
    _OF_A_VALUE: (
        "allclose",
        "corrcoef",
        "cov",
        "equal",
        "nn.functional.ctc_loss",
        "nn.functional.gaussian_nll_loss",
    ),
    "torch.export failed": ("combinations",),
    "forward takes no tensor and makes none": ("broadcast_shapes",),
    "complex": (*_COMPLEX, "chalf", *(f"fft.{name}" for name in (*_SPECTRA, *_OVER_SPECTRA))),
    "in the layout torch.sparse": ("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"),
    "torch.uint64": ("hash_tensor",),
    "writes into a tensor that requires a gradient": ("nn.functional.embedding",),
}
