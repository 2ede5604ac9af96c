"""What each family's page shows: a module a family, with its sentences, tables and charts."""
