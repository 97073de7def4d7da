"""What tests register here ends with them."""

from tests.support.registry_cleanup import no_entries_left as no_entries_left
