"""The contract of feature stores, in parts that tests.contracts.test_store puts together."""
