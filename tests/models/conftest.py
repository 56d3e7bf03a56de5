"""transformers imports torchao, whose sources warn when they are first compiled; here, outside of any test."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    try:
        import torchao  # noqa: F401
    except ImportError:
        pass
    import transformers.modeling_utils  # noqa: F401
