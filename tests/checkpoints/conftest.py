"""transformers imports torchao, whose sources warn when they are first compiled; here, outside of any test."""

import contextlib
import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    with contextlib.suppress(ImportError):
        import torchao  # noqa: F401
    import transformers.modeling_utils  # noqa: F401
