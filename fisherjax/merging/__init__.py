"""Summarize clients, check their updates, and merge them to one model.

Where to find: `_server_half` has the steps of the server, `_running_statistics` the average of
BatchNorm's statistics, `run_exchanges` the messages without training. Updates are refused in
`_upload_checks` (kind, leaves, weights) and `_finite_uploads` (values that are not finite).
"""

from fisherjax._finite_uploads import Diverged, check_updates
from fisherjax.merging._running_statistics import SumsAndStatistics
from fisherjax.merging._server_half import Merged, server_half
from fisherjax.merging.merges import merge
from fisherjax.merging.run_exchanges import Message, exchange, exchange_memory, messages
from fisherjax.merging.streams import merge_stream, merge_sums, sum_stream
from fisherjax.merging.summaries import summarize, summarize_cohort, summarize_memory

__all__ = [
    "Diverged",
    "Merged",
    "Message",
    "SumsAndStatistics",
    "check_updates",
    "exchange",
    "exchange_memory",
    "merge",
    "merge_stream",
    "merge_sums",
    "messages",
    "server_half",
    "sum_stream",
    "summarize",
    "summarize_cohort",
    "summarize_memory",
]
