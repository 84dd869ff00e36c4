"""No check without an entry: every `raise` is on the page, or stands here with a reason."""

from collections import Counter

import pytest

from tests.errors.catalogue import read_topics
from tests.errors.running import Site, ours, raise_sites

ROOMS = (
    "config.py",
    *(
        f"{room}/**/*.py"
        for room in (
            "pjit",
            "sharding",
            "array",
            "program",
            "pictures",
            "numpy",
            "processes",
            "multihost",
            "testing",
            "legacy",
            "tpu",
            "cloud",
            "_jax",
        )
    ),
)

PROCESSES = "needs several processes, which scripts beside the tests of its room have"
PLACES = "needs a launcher's environment, which tests/multihost/test_place.py makes"
ROLL = "needs several processes, which are threads in tests/processes/test_roll_call.py"
WORLDS = "needs several processes, which tests/legacy/pod_worlds.py has"
PODS = "needs several processes, which the scripts pod_*.py in tests/multihost are"
AGREEMENT = "needs several processes, which tests/program/agreeing.py and sharing.py have"
GSPMD = "needs the GSPMD partitioner, under which tests/pjit/test_unreduced.py calls it"
PLANS = "a plan that pjit and compile_stablehlo never make; tests/program makes them by hand"
FOREIGN = "one of many texts of tests/program/goldens/foreign/errors.txt"
COMPILER = "the compilers at hand never do it; tests stand in for one that does"
HEADER = "a header with a checksum that fits and no sense; test_saving.py changes every part"
MEMORY = "needs a process with little memory, which tests/array/test_faults.py has"
LAUNCHED = "needs processes that fail, which tests/testing has"
PLUGIN = "raised inside pytest; tests/testing/test_plugin.py"
STORAGE = "a storage that fails late, as in tests/legacy/test_serialization_errors.py"
PASSED_ON = "raises again what JAX or a caller of the package raised"

# File, function, and a part of the statement; and why no call on the page raises it.
RUNNER = "what the command line says; tests/legacy/test_command.py"
OWN_WORDS = "what Python says of an attribute that is not there"

SKIPS = "skips a test; the line of its name in tests/legacy/working.py reaches it"

FOLDERS = "needs a folder of its own, which tests/cloud and tests/tpu/preflight/sweep make"
CLOUD = "needs a cloud, for which tests/cloud has a stand-in"

UNREACHED = {
    ("cloud/bundle.py", "list_files", "no file in it"): FOLDERS,
    ("cloud/bundle.py", "write_bundle", ""): FOLDERS,
    ("cloud/commands.py", "check", ""): CLOUD,
    ("cloud/commands.py", "show", ""): CLOUD,
    ("cloud/commands.py", "_popen", ""): CLOUD,
    ("cloud/gke.py", "_end", ""): CLOUD,
    ("cloud/gke.py", "_check_started", ""): CLOUD,
    ("cloud/provisioning.py", "create", ""): CLOUD,
    ("cloud/provisioning.py", "_wait_for_state", "will not come"): CLOUD,
    ("cloud/provisioning.py", "_wait_for_state", "there is no TPU"): CLOUD,
    ("cloud/provisioning.py", "_wait_for_state", "is not ready"): CLOUD,
    ("cloud/provisioning.py", "_check_count", ""): CLOUD,
    ("cloud/provisioning.py", "_wait_for_ssh", ""): CLOUD,
    ("cloud/reaching.py", "check_all", ""): CLOUD,
    ("cloud/jobs.py", "newest_job", ""): CLOUD,
    ("cloud/jobs.py", "_check_started", "has no folder"): CLOUD,
    ("cloud/jobs.py", "_check_started", "is held"): CLOUD,
    ("cloud/slices.py", "ready", ""): CLOUD,
    ("cloud/slices.py", "_listed", ""): CLOUD,
    ("legacy/era/devices.py", "create_global_mesh", "SkipTest"): SKIPS,
    ("legacy/era/modules.py", "attribute", "has no attribute"): OWN_WORDS,
    ("legacy/host_local.py", "_mapped", ""): WORLDS,
    ("legacy/host_local.py", "lower", ""): WORLDS,
    ("legacy/host_local.py", "_spec", ""): WORLDS,
    ("legacy/world_function.py", "_check_same_everywhere", ""): WORLDS,
    ("legacy/command.py", "read_command", "needs the name"): RUNNER,
    ("legacy/command.py", "read_command", "none of its options"): RUNNER,
    ("legacy/command.py", "_program", ""): RUNNER,
    ("legacy/running.py", "_read", ""): RUNNER,
    ("legacy/running.py", "_read_found", ""): RUNNER,
    ("legacy/installing.py", "behind", ""): OWN_WORDS,
    ("legacy/stand_ins.py", "get", ""): OWN_WORDS,
    ("legacy/refusals.py", "__getattr__", ""): OWN_WORDS,
    ("legacy/era/util.py", "split_dict", ""): "as it was: the key alone; test_everyday.py",
    ("array/attempts.py", "_check_unreduced", ""): GSPMD,
    ("pjit/reductions.py", "check_reductions", "GSPMD"): GSPMD,
    ("program/annotate.py", "_gspmd_text", ""): GSPMD,
    ("pjit/arguments.py", "_compatible", "{error}"): "JAX's own arrays carry its own shardings",
    ("pjit/arguments.py", "_compatible", "one shape only"): "as above: JAX refuses others before",
    ("pjit/arguments.py", "check_concrete", "raise error"): PASSED_ON,
    ("pjit/constraint.py", "_is_all_manual", ""): "for jaxprs traced elsewhere; test_nested.py",
    ("pjit/executable.py", "_checked", ""): "for the two classes that derive from it",
    ("legacy/parsed.py", "get_op_sharding_from_executable", ""): COMPILER,
    ("pjit/saving.py", "_joined", ""): HEADER,
    ("pjit/trees.py", "tree_from_json", "entries for the keys"): HEADER,
    ("pjit/trees.py", "_write_place", ""): "is caught, and the node written as unknown",
    ("pjit/trees.py", "_read", ""): HEADER,
    ("program/container.py", "unpack", "a section"): HEADER,
    ("_jax/described.py", "described", ""): "damage; test_saving_topologies.py",
    ("_jax/torus.py", "_bytes_of", ""): "is caught: the topology does not say it",
    ("_jax/torus.py", "_fields", ""): "as above",
    ("_jax/torus.py", "_varint", ""): "as above",
    ("tpu/preflight/targets.py", "_module", "there is no"): "names a folder; tests/commands",
    ("tpu/preflight/compilation.py", "compile_for_report", ""): "in libtpu's words; test_memory.py",
    ("tpu/preflight/sweep/api.py", "_meshes", ""): "what factorisations() has raised",
    ("tpu/preflight/sweep/worker.py", "_end_with", ""): "its parent is gone; test_pool.py",
    ("tpu/preflight/sweep/store.py", "known", ""): FOLDERS,
    ("program/container.py", "_read_header", ""): HEADER,
    ("program/environment.py", "from_json", ""): HEADER,
    ("program/saved.py", "save_program", ""): PROCESSES,
    ("program/saved.py", "_check_self_contained", "has effects"): "effects come with callbacks",
    ("program/saved.py", "_executable_bytes", ""): COMPILER,
    ("program/saved.py", "load", ""): COMPILER,
    ("program/saved_values.py", "type_to_json", ""): "keys of a user's own kind; test_saving.py",
    ("program/saved_values.py", "_sizes", ""): HEADER,
    ("_jax/executables.py", "keys_of", ""): "dtypes of other keys are refused before",
    ("pjit/step.py", "_alive", ""): "when a call fails is up to the runtime; test_step.py",
    ("sharding/convert.py", "_from_jax", ""): "JAX has no other public class",
    ("sharding/parse.py", "get_pspec_from_executable", ""): COMPILER,
    ("array/constructors.py", "array_of_pieces", "none of the sharding's"): PROCESSES,
    ("array/singles.py", "joined", "no arrays to"): PROCESSES,
    ("array/host.py", "_fetch", "has none of the devices"): PROCESSES,
    ("array/host.py", "_fetch", "not wholly in this process"): PROCESSES,
    ("array/array.py", "on_device_size_in_bytes", ""): PROCESSES,
    ("array/variables.py", "check_constant", "can't become"): PROCESSES,
    ("array/together.py", "_asked", "_missed"): PROCESSES,
    ("array/together.py", "_asked", "different arrays"): PROCESSES,
    ("array/together.py", "_compare", "_missed"): PROCESSES,
    ("array/together.py", "_compare", "_unequal"): PROCESSES,
    ("array/to_host.py", "to_host", "has none of the devices"): PROCESSES,
    ("array/to_host.py", "_local_box", "holds no piece"): PROCESSES,
    ("array/to_host.py", "_local_box", "no one block"): PROCESSES,
    ("array/to_host.py", "_meet", "error.after"): PROCESSES,
    ("array/to_host.py", "_meet", "different arrays"): PROCESSES,
    ("processes/meeting.py", "meet", "MissedError"): PROCESSES,
    ("processes/meeting.py", "meet", "DeadlockError"): PODS,
    ("processes/connections.py", "of", ""): ROLL,
    ("processes/connections.py", "receive", "not a line"): ROLL,
    ("processes/connections.py", "receive", "not an object"): ROLL,
    ("processes/roll_call.py", "_wait", "self._missing"): ROLL,
    ("processes/roll_call.py", "_wait", "ConflictError(trouble)"): ROLL,
    ("processes/roll_call.py", "_admit", ""): ROLL,
    ("processes/roll_call.py", "_reach", ""): ROLL,
    ("processes/roll_call.py", "_wait", "says nothing"): ROLL,
    ("processes/roll_call.py", "_wait", "something_else"): ROLL,
    ("processes/roll_call.py", "_wait", "str(error)"): ROLL,
    ("processes/roll_call.py", "_wait", "reason)"): ROLL,
    ("processes/roll_call.py", "_take", "conflict"): ROLL,
    ("processes/roll_call.py", "_take", "absent"): ROLL,
    ("processes/connections.py", "connect", ""): "by chance, of one port in tens of thousands",
    ("multihost/barriers.py", "barrier", "error.after"): PODS,
    ("multihost/barriers.py", "sync_global_devices", "error.after"): PODS,
    ("multihost/barriers.py", "sync_global_devices", "different names"): PODS,
    ("multihost/coming.py", "come_together", "_absent_text"): PODS,
    ("multihost/coming.py", "come_together", "found by"): PODS,
    ("multihost/coming.py", "come_together", "_listen_text"): PODS,
    ("multihost/initialize.py", "_check_same", ""): PODS,
    ("multihost/place.py", "_cluster", ""): PLACES,
    ("multihost/place.py", "_detected", ""): PLACES,
    ("multihost/place.py", "_agreed", ""): PLACES,
    ("multihost/place.py", "_alone", "batch script"): PLACES,
    ("multihost/host_mesh.py", "_host_mesh", "_gap_text"): PODS,
    ("multihost/host_mesh.py", "_host_mesh", "none of the"): PODS,
    ("multihost/linear.py", "_refuse_in_program", ""): PODS,
    ("multihost/calls.py", "_missing_told", ""): PODS,
    ("multihost/calls.py", "_check_calls", "different functions"): PODS,
    ("multihost/calls.py", "_check_calls", "failed in"): PODS,
    ("multihost/calls.py", "check_same_types", ""): PODS,
    ("multihost/gather.py", "_check_tiled", ""): PODS,
    ("multihost/broadcast.py", "_own", ""): PODS,
    ("multihost/equal.py", "assert_equal", ""): PODS,
    ("multihost/parts.py", "compare_parts", ""): PODS,
    ("multihost/parts.py", "_global_type", ""): PODS,
    ("multihost/parts.py", "_check_values", ""): PODS,
    ("array/host_put.py", "put_values", "raise scarce"): MEMORY,
    ("array/moving.py", "_put_array", "raise scarce"): MEMORY,
    ("array/moving.py", "_carried_out", 'at_path(error, "x")'): MEMORY,
    ("array/constructors.py", "_staged", "raise scarce"): MEMORY,
    ("array/makers.py", "_local_devices", ""): PROCESSES,
    ("array/attempts.py", "tried_again", "raise error"): PASSED_ON,
    ("array/attempts.py", "_said_otherwise", "raise error"): PASSED_ON,
    ("array/process_local.py", "_inferred_shape", "cuts by the global shape"): PROCESSES,
    ("array/process_local.py", "_inferred_shape", "distinct tiles per dimension"): PROCESSES,
    ("array/process_local.py", "_inferred_shape", "accepted are multiples"): PROCESSES,
    ("program/agreement/group.py", "admit", ""): AGREEMENT,
    ("program/agreement/group.py", "_came", "waited"): AGREEMENT,
    ("program/agreement/group.py", "_check_compared", ""): AGREEMENT,
    ("program/shared_binary.py", "source", ""): AGREEMENT,
    ("program/shared_binary.py", "_meet", ""): AGREEMENT,
    ("program/annotate.py", "_checked_text", ""): PLANS,
    ("program/emit.py", "write_main", "no function @main"): PLANS,
    ("program/emit.py", "write_main", "does not verify"): PLANS,
    ("program/emit.py", "_check_values", "the plan has"): PLANS,
    ("program/emit.py", "_check_values", "is a {kind}"): PLANS,
    ("program/emit.py", "_check_values", "has the shape"): PLANS,
    ("program/plan.py", "__post_init__", ""): PLANS,
    ("program/plan.py", "_check_devices", ""): PLANS,
    ("program/foreign.py", "read_foreign", "in a circle"): FOREIGN,
    ("program/foreign.py", "_count", ""): FOREIGN,
    ("program/foreign.py", "_value", "which no array can be"): FOREIGN,
    ("program/foreign.py", "_value", "no array has such elements"): FOREIGN,
    ("program/foreign.py", "_partitioner", ""): FOREIGN,
    ("program/foreign.py", "_check_partitions", "the module's mesh"): FOREIGN,
    ("program/foreign.py", "_check_text", "{text!r}: {error}"): FOREIGN,
    ("program/foreign.py", "_check_text", "which is for"): FOREIGN,
    ("program/readback.py", "_reported", ""): COMPILER,
    ("program/readback.py", "_chosen", ""): COMPILER,
    ("program/readback.py", "_logical_text", ""): COMPILER,
    ("_jax/lowering.py", "lower_body", "these effects"): "effects of references, by number",
    ("_jax/lowering.py", "_abstract_mesh", ""): "no primitive of JAX asks for it under two meshes",
    ("_jax/modules.py", "annotate", ""): PASSED_ON,
    ("_jax/topologies.py", "compile_only_devices", "not installed"): "tests/tpu/test_topologies.py",
    ("_jax/topologies.py", "compile_only_devices", "knows no"): "names are checked before",
    ("_jax/modules.py", "verify", ""): PASSED_ON,
    ("_jax/sources.py", "read_module", "of a version too new"): "no JAX at hand writes one",
    ("testing/functions.py", "_load", ""): "a module that was imported here and can't be there",
    ("testing/functions.py", "check_is_no_import", ""): LAUNCHED,
    ("testing/launcher.py", "_await_start", ""): LAUNCHED,
    ("testing/launcher.py", "__init__", ""): LAUNCHED,
    ("testing/launcher.py", "_lose_guard", ""): LAUNCHED,
    ("testing/channel.py", "_exactly", ""): "caught: the launcher is gone; test_orphans.py",
    ("testing/crew.py", "__init__", ""): LAUNCHED,
    ("testing/pods.py", "run_script", "{title}: {done.report()}"): LAUNCHED,
    ("testing/pytest_inside.py", "_refuse_to_debug", ""): PLUGIN,
    ("testing/pytest_pods.py", "by", "it {what}"): PLUGIN,
    ("testing/pytest_pods.py", "by", "{name} is {value!r}"): PLUGIN,
    ("testing/pytest_pods.py", "by", "timeout is"): PLUGIN,
    ("testing/pytest_pods.py", "prepare", ""): PLUGIN,
    ("testing/pytest_pods.py", "run", ""): PLUGIN,
    ("testing/pytest_pods.py", "_start", ""): PLUGIN,
    ("testing/expectations.py", "assert_peak_bytes_at_most", "does not say"): COMPILER,
    (
        "_jax/serialization.py",
        "",
        "not installed",
    ): "raised at import; tests/legacy",
    ("legacy/serialization/commits.py", "result", ""): STORAGE,
    ("legacy/serialization/commits.py", "__await__", ""): STORAGE,
    ("legacy/serialization/manager.py", "__init__", ""): "needs processes that lack a coordinator",
    ("legacy/serialization/manager.py", "check_for_errors", ""): PASSED_ON,
    ("legacy/serialization/writing.py", "_check", "this process alone"): PROCESSES,
    ("_jax/versions.py", "check_supported", ""): "raised at import; tests/test_project.py",
    ("_jax/versions.py", "check_libtpu", ""): "needs another libtpu; tests/tpu/test_libtpu.py",
}


def matches(site: Site) -> list[tuple[str, str, str]]:
    """The exceptions that speak of a statement."""
    return [
        key for key in UNREACHED if key[:2] == (site.file, site.function) and key[2] in site.source
    ]


@pytest.fixture(scope="module")
def unhit() -> list[Site]:
    """Every `raise` that no entry of the catalogue comes to."""
    hit = {place for topic in read_topics() for m in topic.mistakes for place in ours(m).sites}
    return [
        site
        for site in raise_sites(*ROOMS)
        if not any(site.file == file and site.first <= line <= site.last for file, line in hit)
    ]


@pytest.mark.slow
def test_every_check_has_an_entry(unhit: list[Site]) -> None:
    left = [site for site in unhit if not matches(site)]
    assert not left, (
        "no call in tests/errors/mistakes raises these; add an entry for each (and run "
        "make goldens), or a reason in UNREACHED:\n  " + "\n  ".join(map(str, left))
    )


def test_every_exception_is_one(unhit: list[Site]) -> None:
    spoken_of = Counter(key for site in unhit for key in matches(site))
    assert set(spoken_of) == set(UNREACHED), "these are raised by an entry, or gone"
    assert set(spoken_of.values()) == {1}, spoken_of


@pytest.mark.slow
def test_statements_are_found() -> None:
    sites = raise_sites(*ROOMS)
    assert len(sites) > 150
    assert {site.file.partition("/")[0] for site in sites} >= {"pjit", "sharding", "array"}
    (one,) = [site for site in sites if "pjit takes a function, not" in site.source]
    assert (one.file, one.function) == ("pjit/options.py", "check_callable")
    assert one.source.startswith("raise ArgumentError(") and one.first < one.last
