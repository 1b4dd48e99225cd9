# Who may do what. Nobody here may change the project, its rights, or the bucket itself.

resource "google_service_account" "worker" {
  account_id   = "weightbeam-worker"
  display_name = "Weightbeam: Dataflow's workers and the template's launcher"
  depends_on   = [google_project_service.enabled]
}

resource "google_service_account" "watcher" {
  account_id   = "weightbeam-watcher"
  display_name = "Weightbeam: looks for new releases and starts Dataflow jobs"
  depends_on   = [google_project_service.enabled]
}

resource "google_service_account" "scheduler" {
  account_id   = "weightbeam-scheduler"
  display_name = "Weightbeam: starts the watcher"
  depends_on   = [google_project_service.enabled]
}

resource "google_service_account" "builder" {
  account_id   = "weightbeam-builder"
  display_name = "Weightbeam: builds the image and the template"
  depends_on   = [google_project_service.enabled]
}

locals {
  project_roles = {
    "roles/dataflow.worker"    = google_service_account.worker
    "roles/dataflow.developer" = google_service_account.watcher
    "roles/logging.logWriter"  = google_service_account.builder
  }
  converters = { # they read and write checkpoints, and read from the hub
    worker  = google_service_account.worker
    watcher = google_service_account.watcher
  }
  repository_roles = {
    "roles/artifactregistry.reader" = google_service_account.worker
    "roles/artifactregistry.writer" = google_service_account.builder
  }
  settings = ["watch.yaml", "templates/", "builds/"] # written by people and by the builder
  objects  = "projects/_/buckets/${google_storage_bucket.bucket.name}/objects"
}

resource "google_project_iam_member" "project" {
  for_each = local.project_roles
  project  = var.project
  role     = each.key
  member   = each.value.member
}

# They parse strangers' files. So they write no object that says what runs, where, and whom it tells.
resource "google_storage_bucket_iam_member" "objects" {
  for_each = local.converters
  bucket   = google_storage_bucket.bucket.name
  role     = "roles/storage.objectUser"
  member   = each.value.member

  condition {
    title      = "checkpoints, no configuration, template or source"
    expression = join(" && ", [for name in local.settings : "!resource.name.startsWith('${local.objects}/${name}')"])
  }
}

resource "google_storage_bucket_iam_member" "settings" {
  for_each = local.converters
  bucket   = google_storage_bucket.bucket.name
  role     = "roles/storage.objectViewer"
  member   = each.value.member

  condition {
    title      = "configuration and template, to be read"
    expression = join(" || ", [for name in local.settings : "resource.name.startsWith('${local.objects}/${name}')"])
  }
}

# Beam asks whether the bucket keeps what is deleted.
resource "google_storage_bucket_iam_member" "about" {
  for_each = local.converters
  bucket   = google_storage_bucket.bucket.name
  role     = "roles/storage.legacyBucketReader"
  member   = each.value.member
}

resource "google_storage_bucket_iam_member" "builder" {
  bucket = google_storage_bucket.bucket.name
  role   = "roles/storage.objectUser"
  member = google_service_account.builder.member

  condition {
    title      = "source and template, no checkpoints"
    expression = "resource.name.startsWith('${local.objects}/builds/') || resource.name.startsWith('${local.objects}/templates/')"
  }
}

resource "google_artifact_registry_repository_iam_member" "images" {
  for_each   = local.repository_roles
  location   = google_artifact_registry_repository.images.location
  repository = google_artifact_registry_repository.images.name
  role       = each.key
  member     = each.value.member
}

resource "google_secret_manager_secret_iam_member" "hub_token" {
  for_each  = local.converters
  secret_id = google_secret_manager_secret.hub_token.id
  role      = "roles/secretmanager.secretAccessor"
  member    = each.value.member
}

resource "google_secret_manager_secret_iam_member" "releases_webhook" {
  secret_id = google_secret_manager_secret.releases_webhook.id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.watcher.member
}

# Training runs are read, by the watcher and by its workers, and never written to.
resource "google_storage_bucket_iam_member" "runs" {
  for_each = { for pair in setproduct(keys(local.converters), var.run_buckets) : join("/", pair) => { account = pair[0], bucket = pair[1] } }
  bucket   = each.value.bucket
  role     = "roles/storage.objectViewer"
  member   = local.converters[each.value.account].member
}

# A token that may write is the watcher's alone: workers have no use for it.
resource "google_secret_manager_secret_iam_member" "publish_token" {
  secret_id = google_secret_manager_secret.publish_token.id
  role      = "roles/secretmanager.secretAccessor"
  member    = google_service_account.watcher.member
}

# The watcher's jobs run as the worker.
resource "google_service_account_iam_member" "watcher_as_worker" {
  service_account_id = google_service_account.worker.name
  role               = "roles/iam.serviceAccountUser"
  member             = google_service_account.watcher.member
}
