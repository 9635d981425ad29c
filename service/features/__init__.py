"""Reading the feature store on behalf of requests: vectors, neighbours, snapshots, the store's health."""
