"""What the command line does, one file a command. Importing these files must not import torch: help stays fast."""

DTYPES = ("auto", "float64", "float32", "bfloat16", "float16")


def check_place(dtype: str, device: str) -> None:
    """Refuse a precision or a device that is not there, before a model is loaded."""
    import torch

    from ..types import InputError

    if dtype not in DTYPES:
        raise InputError(f"there is no dtype {dtype!r}; choose one of {', '.join(DTYPES)}")
    if device == "auto":
        return
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError):
        has = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise InputError(f"there is no device {device!r} here; choose one of auto, {', '.join(has)}") from None
