"""SMP's names: `install()` gives torch.sagemaker to this process, `uninstall()` removes it."""

from octavo.compat.smp.shim import install, uninstall

__all__ = ["install", "uninstall"]
