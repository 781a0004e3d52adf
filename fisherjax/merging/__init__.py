"""Summarize and merge: what clients send, whether it can be trusted, and the model made of it."""

from fisherjax.merging.exchanges import Message, exchange, exchange_memory, messages
from fisherjax.merging.merges import merge, merge_stream, merge_sums
from fisherjax.merging.server_half import Added, Merged, server_half
from fisherjax.merging.summaries import summarize, summarize_cohort, summarize_memory
from fisherjax.updates import check_updates

__all__ = [
    "Added",
    "Merged",
    "Message",
    "check_updates",
    "exchange",
    "exchange_memory",
    "merge",
    "merge_stream",
    "merge_sums",
    "messages",
    "server_half",
    "summarize",
    "summarize_cohort",
    "summarize_memory",
]
