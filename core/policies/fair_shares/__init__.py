"""`fair`: shares of tenants over another policy."""
