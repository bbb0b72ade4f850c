"""The messages whose advice no test follows, and the reasons: by module, and by the first words of the message."""

from __future__ import annotations

__all__ = ["UNTRIED"]

_RAY = "needs a cluster of Ray; "

UNTRIED: dict[tuple[str, str], str] = {
    ("bench/samples.py", "no samples in the cache"): "half a minute; tests/cli/test_bench.py measures files (soak)",
    ("cli/demo.py", ""): "ten seconds of processors each; tests/cli/test_demo.py runs both ways",
    ("cli/metrics.py", ""): "tests/report/test_metrics.py makes the messages",
    ("cli/nodes.py", "every node writes files"): _RAY + "tests/ray/test_advice.py follows it",
    ("cli/nodes.py", "convert INPUT --on ray"): _RAY + "tests/ray/test_advice.py follows it",
    ("cli/nodes.py", "run: cachetool verify --repair"): _RAY + "tests/ray/test_advice.py follows it",
    ("cli/pull.py", "nothing was left to draw"): "says why nothing came; tests/test_parts.py makes it",
    ("cluster/connect.py", ""): _RAY + "tests/ray/test_unconnected.py and test_pull.py make the messages",
    ("cluster/engine.py", "{} nodes are called"): _RAY + "advises how to start one",
    ("cluster/node.py", "the cache {} has another listing"): _RAY + "and two caches that were filled apart",
    ("cluster/pull.py", ""): _RAY + "tests/cluster/test_pull.py and tests/ray/test_pull.py make the messages",
    ("cluster/verbs.py", "no node has a cache"): _RAY + "tests/ray/test_advice.py follows it",
    ("cluster/verbs.py", "nodes {} and {} share"): _RAY + "tests/ray/test_advice.py follows it",
    ("conversion/to_files.py", "{} does not see {}, the folder"): _RAY + "tests/ray/test_convert.py makes the message",
    ("core/causes.py", ""): "what helps against slowness; tests/check/test_live.py makes the sentences",
    ("core/nodes.py", "a node is called"): _RAY + "advises how to start one",
    ("formats/tfrecord_package.py", "the tfrecord package"): "would change what is installed here",
    ("loaders/feed/cf.py", ""): "tests/loaders/test_cf.py makes the messages",
    ("loaders/feed/jpeg.py", ""): "images; tests/loaders/test_decode.py makes the messages",
    ("pull/run.py", "raise --share or --max-size"): "tests/cache/test_shares.py makes it",
    ("cache/shares.py", "--share {}% of dataset"): "tests/cache/test_shares.py makes it",
    ("loaders/snapshots/mixed.py", "dataset {} holds the part"): "pulls with --part; two caches of tests/test_parts.py",
    ("loaders/snapshots/epochs.py", "offsets= leaves out"): "a note; tests/sources/test_runs.py pulls with --runs",
    ("loaders/tensorflow.py", "dataset {} has no samples"): "TensorFlow; tests/loaders/test_tensorflow.py follows it",
    ("proc/child.py", "a worker ran out of memory"): "memory; tests/faults/test_environments.py sets limits (soak)",
    ("proc/disk.py", "no more processes or threads"): "limits of a user, which root has not",
    ("proc/disk.py", "out of memory"): "memory; tests/faults/test_environments.py sets limits (soak)",
    (
        "sources/blame.py",
        "\nrun the command again",
    ): "objects that change; tests/cli/test_convert_skip.py follows it",
    ("sources/blocks.py", "{} was written by"): "tests/sources/test_blocks.py makes it",
    ("sources/classes.py", ""): "tests/cli/test_classes.py follows it",
    ("sources/file_listing.py", "--runs draws neighbouring rows"): "tests/sources/test_runs.py makes it",
    ("sources/grouping.py", "{}: most of the new objects"): "a bucket; tests/cli/test_mixed_folders.py follows it",
    (
        "sources/parquet.py",
        "{}: {} has {} rows",
    ): "a fault of pyarrow; tests/sources/test_remote.py makes it",
    ("sources/store_list.py", "{} does not list in the order"): "a store at fault: no other sorts its keys otherwise",
    ("sources/segments.py", "{} does not list in the order"): "a store at fault: no other sorts its keys otherwise",
    ("sources/zarr_keys.py", ""): "no store without a list; tests/sources/test_zarr_without_list.py follows it",
    ("stores/base.py", "\nleave such objects out"): "a server at fault; tests/cli/test_buckets.py follows it",
    ("stores/credentials.py", "profile {} has no keys"): "the aws program and an account",
    ("stores/object.py", "leave such keys out"): "a bucket; tests/cli/test_buckets.py follows it",
    ("stores/whole.py", ""): "a server without ranges; tests/cli/test_without_ranges.py follows it",
}
