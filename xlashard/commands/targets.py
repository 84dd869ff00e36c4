"""Programs and topologies of command line targets."""

from collections.abc import Mapping, Sequence

from xlashard.errors import ArgumentError
from xlashard.tpu import Topology, topology
from xlashard.tpu.preflight.target_loading import TargetProgram, load_program


def find_program(
    target: str, place: Topology, axes: Mapping[str, int] | None, settings: Sequence[str]
) -> TargetProgram:
    """Return the program of a target.

    Args:
        target: `CONFIG.toml`, or `package.module:function`.
        place: The devices.
        axes: Mesh axis sizes, if specified.
        settings: `KEY=VALUE` words that override the settings file.

    Raises:
        XlashardError: If the file or function doesn't exist, or returns no program.
    """
    if target.endswith(".toml"):
        return _of_settings(target, place, axes, settings)
    if settings:
        raise ArgumentError(
            f"--set is invalid for {target}: expected a settings file such as configs/tiny.toml"
        )
    return load_program(target, place, axes)


def _of_settings(
    path: str, place: Topology, axes: Mapping[str, int] | None, words: Sequence[str]
) -> TargetProgram:
    # Needs the packages of the extra `train`, which a function of one's own does without.
    from xlashard.train.config.settings import load_settings
    from xlashard.train.model.programs import training_step

    settings = load_settings(path, words)
    mesh = place.mesh(settings.mesh if axes is None else axes)
    step = training_step(settings, mesh)
    return TargetProgram(step.function, mesh, step.args, {}, step.workload)


def topologies_for(
    target: str, topologies: str, slices: int | None, words: Sequence[str]
) -> list[Topology]:
    """Return the specified topologies, or those of the settings file.

    Args:
        target: `CONFIG.toml`, or `package.module:function`.
        topologies: Names of topologies, separated by commas; may be empty.
        slices: Number of slices of each, if specified.
        words: `KEY=VALUE` words that override the settings file.

    Raises:
        ArgumentError: If no topology is specified.
        XlashardError: If a topology or file is unknown.
    """
    names = [name.strip() for name in topologies.split(",") if name.strip()]
    if not names and target.endswith(".toml"):
        from xlashard.train.config.settings import load_settings

        devices = load_settings(target, words).devices
        if devices.topology:
            names = [devices.topology]
            slices = devices.slices if slices is None else slices
    if not names:
        raise ArgumentError("for which chips? Write, for example, --topology v5p-128")
    return [topology(name, 1 if slices is None else slices) for name in names]


def settings_of(path: str, words: Sequence[str]) -> tuple[tuple[str, ...], str]:
    """Return the mesh axes of a settings file, and all settings as TOML.

    Args:
        path: A TOML file.
        words: `KEY=VALUE` words that override the file.
    """
    from xlashard.train.config.settings import load_settings
    from xlashard.train.config.toml import to_toml

    settings = load_settings(path, words)
    return tuple(settings.mesh), to_toml(settings)
