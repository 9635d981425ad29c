"""Who is told of events, and how deliveries are made without reaching inside."""
