locals {
  bucket       = coalesce(var.bucket, "${var.project}-weightbeam")
  watch_config = coalesce(var.watch_config, "gs://${local.bucket}/watch.yaml")
  scheduled    = var.image == null ? 0 : 1
  scratch      = ["temp/", "staging/", "builds/"] # of Beam, of the launcher, of Cloud Build

  services = [
    "artifactregistry.googleapis.com",
    "cloudbuild.googleapis.com",
    "cloudscheduler.googleapis.com",
    "compute.googleapis.com",
    "dataflow.googleapis.com",
    "iam.googleapis.com",
    "logging.googleapis.com",
    "run.googleapis.com",
    "secretmanager.googleapis.com",
    "storage.googleapis.com",
  ]
}

resource "google_project_service" "enabled" {
  for_each           = toset(local.services)
  service            = each.value
  disable_on_destroy = false # others in the project may use them
}

resource "google_storage_bucket" "bucket" {
  name                        = local.bucket
  location                    = var.region
  uniform_bucket_level_access = true
  public_access_prevention    = "enforced"

  soft_delete_policy {
    retention_duration_seconds = 604800 # seconds, the least: what is replaced or deleted by mistake can be had back for a week
  }

  lifecycle_rule {
    condition {
      age            = 7 # days; a conversion takes hours
      matches_prefix = local.scratch
    }
    action {
      type = "Delete"
    }
  }

  lifecycle_rule {
    condition {
      age = 7
    }
    action {
      type = "AbortIncompleteMultipartUpload"
    }
  }

  depends_on = [google_project_service.enabled]
}

resource "google_artifact_registry_repository" "images" {
  repository_id = "weightbeam"
  format        = "DOCKER"
  location      = var.region

  docker_config {
    immutable_tags = true # the image that a job was started with is the one its late workers get
  }

  depends_on = [google_project_service.enabled]
}

# Their values never pass through Terraform: the README adds them with gcloud.
resource "google_secret_manager_secret" "hub_token" {
  secret_id = "weightbeam-hub-token"

  replication {
    auto {}
  }

  depends_on = [google_project_service.enabled]
}

resource "google_secret_manager_secret" "publish_token" {
  secret_id = "weightbeam-publish-token"

  replication {
    auto {}
  }

  depends_on = [google_project_service.enabled]
}

# A webhook's URL is a secret too: who has it can write there.
resource "google_secret_manager_secret" "releases_webhook" {
  secret_id = "weightbeam-releases-webhook"

  replication {
    auto {}
  }

  depends_on = [google_project_service.enabled]
}
