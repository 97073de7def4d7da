"""Registrations of a test end with it."""

from tests.support.registry_cleanup import no_entries_left as no_entries_left
