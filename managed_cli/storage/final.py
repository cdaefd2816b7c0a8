"""Shards into the one file that a run ends as."""

from __future__ import annotations

import contextlib
import json

from managed_cli.storage import layout
from managed_cli.storage.footer import Footer
from managed_cli.storage.joined import write_joined
from managed_cli.storage.parquet import fsync_directory
from managed_cli.storage.reader import described_files
from managed_cli.storage.schema import RowFormat


def put_final_file(place: layout.OutputPlace, footer: Footer, row_format: RowFormat) -> None:
    """`place.final` is complete, then the shards go. A single one that says the same of the run is the file already.

    Raises:
        OSError, OutputError: it cannot be written; the shards are whole, and `place.final` is what it was.
    """
    shards = layout.shards_in(place.growing)
    if len(shards) == 1 and described_files(shards, row_format)[0].run_facts == json.loads(footer.run_facts):
        shards[0].rename(place.final)  # does nothing where `final` is another name of the same file
    else:
        temp = place.growing / layout.MERGED_TEMP_NAME
        write_joined(temp, shards, footer, row_format)
        temp.rename(place.final)
    fsync_directory(place.final.parent)
    # The file is complete: a shard that cannot be removed now is clutter, which the mark tells from rows.
    with contextlib.suppress(OSError):
        _remove_merged_shards(place)


def _remove_merged_shards(place: layout.OutputPlace) -> None:
    shards = layout.shards_in(place.growing)
    if not shards:
        return
    place.merged_mark.touch()
    fsync_directory(place.growing)
    for shard in shards:
        shard.unlink()
    fsync_directory(place.growing)
    place.merged_mark.unlink()
