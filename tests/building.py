"""`build_model` with its options as keyword arguments."""

from octavo.build import BuildOptions, build_model


def built_model(source, *, device="cpu", config=None, sharding=None, load_from=None, from_rank0=None, **options):
    """The model; arguments are those of `build_model` and the fields of `BuildOptions`."""
    around = {"config": config, "sharding": sharding, "load_from": load_from, "from_rank0": from_rank0}
    return build_model(source, BuildOptions(**options), device=device, **around)
