"""One opaque call of a Function: capture, the site, its attributes, the registry of classes."""

from torch2ort._torch.autograd_functions import makes_quantised, uses_setup_context
from torch2ort.pythonop.attributes import (
    ONNX_TYPES,
    SITE_ATTRIBUTE,
    SITE_META,
    UnstoredObject,
    dump_site,
    load_node,
    load_site,
    node_attributes,
    unstorable,
)
from torch2ort.pythonop.registry import (
    Exporter,
    InplaceMap,
    Registration,
    classes_given,
    register_exporter,
    register_function,
    register_gradient,
    register_inline,
    register_inplace_map,
    register_shape_inferer,
    register_symbolic,
    registered,
    resolve,
    unregister,
)
from torch2ort.pythonop.site import (
    TENSOR,
    PythonOpSite,
    Result,
    Site,
    TensorType,
    qualified_name,
    site_by_key,
)

# Last, as the handlers use what is above.
from torch2ort.pythonop import handlers  # isort: skip

__all__ = [
    "ONNX_TYPES",
    "SITE_ATTRIBUTE",
    "SITE_META",
    "TENSOR",
    "Exporter",
    "InplaceMap",
    "PythonOpSite",
    "Registration",
    "Result",
    "Site",
    "TensorType",
    "UnstoredObject",
    "classes_given",
    "dump_site",
    "handlers",
    "load_node",
    "load_site",
    "makes_quantised",
    "node_attributes",
    "qualified_name",
    "register_exporter",
    "register_function",
    "register_gradient",
    "register_inline",
    "register_inplace_map",
    "register_shape_inferer",
    "register_symbolic",
    "registered",
    "resolve",
    "site_by_key",
    "unregister",
    "unstorable",
    "uses_setup_context",
]
