// 2 x 3 tiles over devices that count 3 x 2: no axis is part of one dimension only
module @f attributes {mhlo.num_partitions = 6 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["_axis_0"=2, "_axis_1"=3], device_ids=[0, 3, 1, 4, 2, 5]>
  sdy.mesh @mesh_0 = <["_axis_0"=2, "_axis_1"=3]>
  func.func public @main(%arg0: tensor<6x6xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"_axis_0"}, {"_axis_1"}]>}) -> (tensor<6x6xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"_axis_0"}, {"_axis_1"}]>}) {
    return %arg0 : tensor<6x6xf32>
  }
}
