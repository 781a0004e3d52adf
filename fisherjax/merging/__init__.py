"""Summarize clients, check their updates, and merge them to one model."""

from fisherjax._divergence import check_updates
from fisherjax.merging._server_half import Merged, SumsAndStatistics, server_half
from fisherjax.merging.client_half import summarize, summarize_cohort, summarize_memory
from fisherjax.merging.exchanges import Message, exchange, exchange_memory, messages
from fisherjax.merging.merges import merge, merge_stream, merge_sums

__all__ = [
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
    "summarize",
    "summarize_cohort",
    "summarize_memory",
]
