"""Registrations of portable files end with their tests."""

from tests.support.registry_cleanup import no_entries_left as no_entries_left
