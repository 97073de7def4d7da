"""What tests register here ends with them."""

from tests.support.registrations import no_entries_left as no_entries_left
