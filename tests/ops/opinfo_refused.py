"""PyTorch's samples of operators that may be refused, by the words of the refusal."""

from __future__ import annotations

_SPECTRA = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")

# Words of the error -> the operators.
EVERYWHERE: dict[str, tuple[str, ...]] = {
    "sets torch's random state": (
        "item",
        "nn.functional.fractional_max_pool2d",
        "nn.functional.fractional_max_pool3d",
        "nn.functional.multi_head_attention_forward",
        "nn.functional.scaled_dot_product_attention",
    ),
    "depends on a value inside a tensor": (
        "allclose",
        "corrcoef",
        "cov",
        "equal",
        "nn.functional.ctc_loss",
        "nn.functional.gaussian_nll_loss",
    ),
    "complex": (
        *("view_as_complex", "complex", "polar", "stft", "cdouble", "cfloat", "chalf"),
        *(f"fft.{name}{axes}" for name in _SPECTRA for axes in ("", "2", "n")),
    ),
    "in the layout torch.sparse": ("sparse.mm.reduce", "sparse.sampled_addmm", "to_sparse"),
    "torch.export failed": ("combinations",),
    "forward takes no tensor and makes none": ("broadcast_shapes",),
    "torch.uint64": ("hash_tensor",),
    "writes into a tensor that requires a gradient": ("nn.functional.embedding",),
}
OF_EXPORTS: dict[str, tuple[str, ...]] = {
    "inverts a Fourier transform": tuple(
        f"fft.{n}{axes}" for n in ("irfft", "hfft") for axes in ("", "2", "n")
    ),
    "has no translation to ONNX": (
        "nn.functional.linear_cross_entropy.chunked",
        "nn.functional.linear_cross_entropy.chunked_none",
    ),
}
# Trained in float64 these differ: eager PyTorch has float32 constants in their derivatives.
OF_EAGER = ("nn.functional.hardsigmoid", "nn.functional.celu")
