"""All about one opaque Function call: capture, the site, its attributes, the registry of classes."""

from torch2ort.pythonop._torch_private import uses_setup_context
from torch2ort.pythonop.attributes import (
    ONNX_TYPES,
    SITE_ATTRIBUTE,
    UnstoredObject,
    dump_site,
    load_site,
    node_attributes,
    unstorable,
)
from torch2ort.pythonop.capture import Capture, internal_site
from torch2ort.pythonop.registry import register_function, resolve
from torch2ort.pythonop.site import (
    TENSOR,
    PythonOpSite,
    Result,
    Site,
    TensorType,
    qualified_name,
    site_by_key,
)

__all__ = [
    "ONNX_TYPES",
    "SITE_ATTRIBUTE",
    "TENSOR",
    "Capture",
    "PythonOpSite",
    "Result",
    "Site",
    "TensorType",
    "UnstoredObject",
    "dump_site",
    "internal_site",
    "load_site",
    "node_attributes",
    "qualified_name",
    "register_function",
    "resolve",
    "site_by_key",
    "unstorable",
    "uses_setup_context",
]
