"""Where a recording's bytes lie: durable commits, leases, object stores, copies fetched from them."""
